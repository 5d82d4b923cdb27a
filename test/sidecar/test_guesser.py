"""Guesses of a draft model's own head change the number of passes, and no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.config import HeadKind
from sglang_qspec.link import Peer
from sglang_qspec.messages import Commit, Commits, Drafted, FromSidecar, SeededSampling
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.guesser import Guesser, OwnHead
from sglang_qspec.sidecar.hydra_model import ReadyHydra
from sglang_qspec.sidecar.text import Guess
from test.sidecar.drafter_driver import ONE, DrafterDriver
from test.sidecar.head_reference import STATES, TEXT, written
from test.sidecar.scripted import ScriptedModel, undecided
from test.sidecar.scripted_head import ScriptedHead, eager

Sequence_ = tuple[int, ...]


def driven(
    model: ScriptedModel, guess: Callable[[Sequence_], int] | None, **options: object
) -> DrafterDriver:
    """A drafter whose model has a head with the script `guess`, or no head if it is None."""
    guesser = None if guess is None else eager(ScriptedHead(model, guess))
    return DrafterDriver(model, guesser=guesser, **options)


def drawn(sequence: Sequence_) -> int:
    """A script without a pattern."""
    return random.Random(hash(sequence)).randrange(1000)


def often(sequence: Sequence_) -> int:
    """A head that is right in two of three cases for the script `drawn`."""
    return drawn(sequence) if random.Random(str(sequence)).randrange(3) else 1


def steps(model: ScriptedModel) -> int:
    return sum(verb == "step" for verb, _, _ in model.passes)


def test_a_head_that_is_always_right_halves_the_passes() -> None:
    model = ScriptedModel(drawn)
    driver = driven(model, drawn)
    driver.submit("a", [1, 2, 3], completions=1, max_new_tokens=21)
    driver.run()
    assert steps(model) == 10  # after the prompt's pass, which gave the first token
    text = [1, 2, 3]
    for token in driver.told[ONE, "a", 0]:
        assert token == drawn(tuple(text))
        text.append(token)
    assert len(text) == 24
    statistics = driver.drafter.statistics
    assert (statistics.guessed_tokens, statistics.right_guesses) == (10, 10)
    assert statistics.drafted_tokens == 21
    driver.leave("a")


@pytest.mark.parametrize("seeded", [None, SeededSampling(7, 1.0, 1 << 30, 1.0, 0.0)])
@pytest.mark.parametrize("guess", [often, lambda _: 5], ids=["often right", "wrong"])
def test_all_drafts_are_those_without_a_head(
    guess: Callable[[Sequence_], int], seeded: SeededSampling | None
) -> None:
    found = []
    for each in (None, guess):
        model = undecided()
        model.script = drawn
        model.second = lambda token: (token + 1) % 1000
        driver = driven(model, each, slots=5)
        for number, limit in enumerate((1, 2, 7, 10)):
            rid = str(number)
            driver.submit(rid, [number, 2, 3], max_new_tokens=limit, seeded=seeded)
        driver.run()
        driver.admit("3")
        driver.commit("3", 0, [900, 901], max_new_tokens=9)
        driver.run()
        driver.commit("3", 2, [902], max_new_tokens=8)
        driver.run()
        found.append((dict(driver.told), dict(driver.seconds)))
        driver.leave("0", "1", "2", "3")
    assert found[0] == found[1]
    assert found[0][0][ONE, "3", MAX_COMPLETIONS]


def test_a_guess_behind_a_stop_token_is_dropped() -> None:
    for stop in (6, 7, 8, 9):
        driver = driven(ScriptedModel(), lambda text: text[-1] + 1)
        driver.submit("a", [1, 2, 3], completions=1, stop=[stop])
        driver.run()
        assert driver.told[ONE, "a", 0] == list(range(4, stop + 1))
        driver.leave("a")


def test_drafts_for_rejection_sampling_keep_a_distribution_for_each_token() -> None:
    model = ScriptedModel()
    driver = driven(model, lambda text: text[-1] + 1)
    sampling = SeededSampling(1, 1.0, 1 << 30, 1.0, 0.0, probabilities=True)
    driver.submit("a", [1, 2, 3], completions=1, seeded=sampling)
    driver.run()
    driver.admit("a")
    model.passes.clear()
    taken: list[tuple[Peer, FromSidecar]] = []
    driver.drafter.follow(ONE, Commits([Commit(driver.number("a"), 0, [50], 9)]))
    while not driver.drafter.idle:
        driver.drafter.step()
        taken += driver.drafter.take()
    drafted = [message for _, message in taken if isinstance(message, Drafted)]
    tokens = [token for message in drafted for token in message.token_ids]
    assert tokens == list(range(51, 60))
    for message in drafted:
        held = [each.token_ids for each in message.candidates]
        assert all(token in ids for token, ids in zip(message.token_ids, held, strict=True))
    assert steps(model) < 9
    statistics = driver.drafter.statistics
    assert statistics.step_tokens == 9 > statistics.step_passes


def test_guesses_need_room_in_the_kv_and_in_the_context() -> None:
    model = ScriptedModel(tokens=14, context_len=12)
    driver = driven(model, lambda text: text[-1] + 1)
    driver.submit("a", [1, 2, 3], completions=1, max_new_tokens=9)
    driver.submit("b", [4, 5], completions=1, max_new_tokens=10)
    driver.run()
    assert driver.told[ONE, "a", 0] == list(range(4, 13))
    assert driver.told[ONE, "b", 0] == list(range(6, 16))
    driver.leave("a", "b")


def test_drafts_go_on_without_a_head_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel()
    head = ScriptedHead(model, lambda text: text[-1] + 1)
    head.failures.append(RuntimeError("broken"))
    driver = DrafterDriver(model, guesser=eager(head))
    driver.submit("a", [1, 2, 3], completions=1)
    driver.run()
    assert driver.told[ONE, "a", 0] == list(range(4, 14))
    assert head.calls == 1
    assert "goes on without it" in caplog.text
    driver.leave("a")


def test_the_head_reads_the_state_and_the_newest_token(tmp_path: Path) -> None:
    folder, draft = written(tmp_path, HeadKind.HYDRA)
    head = OwnHead(ReadyHydra(folder, draft, torch.device("cpu")))
    own = checkpoint.load_hydra(folder, torch.float32, torch.device("cpu"))
    embedding = LlamaForCausalLM.from_pretrained(draft).model.embed_tokens.weight
    with torch.inference_mode():
        logits = own.logits(own.output(embedding[TEXT[1:9]], STATES[:8].float()))
    most, place = logits.softmax(-1).max(-1)
    found = head.guess(TEXT[1:9], STATES[:8])
    assert [each.token_id for each in found] == own.target_ids[place].tolist()
    assert [each.probability for each in found] == pytest.approx(most.tolist(), rel=0.05)
    (unknown,) = head.guess(TEXT[:1], STATES[:1] * float("nan"))
    assert unknown.probability == 0.0


class Oracle:
    """A head that knows some texts, and is wrong every third time."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._next: dict[int, int] = {}
        for text in texts:
            self._next.update(pairwise(text))
        self._calls = 0

    def guess(self, token_ids: Sequence[int], states: torch.Tensor) -> list[Guess]:
        assert len(states) == len(token_ids)
        self._calls += 1
        wrong = self._calls % 3 == 0
        return [Guess(0 if wrong else self._next.get(token, 0), 0.9) for token in token_ids]


def test_the_real_draft_model_drafts_the_same_with_guesses(
    model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_keeps_states", True)
    prompts = {"a": [504, 3575, 282, 4649, 314], "b": [1, 4093, 198, 1780, 314, 260, 10285]}

    def told(guesser: Guesser | None) -> list[list[int]]:
        real: Any = model  # the driver's methods that are used here need no script
        driver = DrafterDriver(real, guesser=guesser)
        for rid, prompt in prompts.items():
            driver.submit(rid, prompt, completions=2, max_new_tokens=24)
        driver.run()
        statistics = driver.drafter.statistics
        if guesser is not None:
            assert statistics.guessed_tokens > statistics.right_guesses > 10
        found = [driver.told[ONE, rid, number] for rid in prompts for number in range(2)]
        driver.leave(*prompts)
        return found

    plain = told(None)
    assert told(eager(Oracle(plain))) == plain
