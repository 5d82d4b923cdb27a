"""A head drafts behind the target's states, whatever comes late, twice or not at all."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.errors import ConfigError
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.checkpoint import AnyHead
from sglang_qspec.heads.config import HeadKind, read
from sglang_qspec.heads.medusa import MedusaHeads
from sglang_qspec.heads.model import Eagle2Head
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Close,
    Commit,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    SeededSampling,
    States,
    Submit,
)
from sglang_qspec.sidecar import head_model, service
from sglang_qspec.sidecar.head_drafter import HeadDrafter
from sglang_qspec.sidecar.head_model import HeadModel
from sglang_qspec.sidecar.head_runner import HeadOptions, HeadRunner
from sglang_qspec.sidecar.options import parser
from test.fuzz.frames import Frames
from test.heads.tiny import (
    VOCAB,
    random_head,
)
from test.sidecar.head_reference import (
    PEER,
    STATES,
    TEXT,
    WIDTH,
    choices_of,
    drafts_of,
    load,
    written,
)


@pytest.fixture(scope="module", params=HeadKind, ids=lambda kind: kind.name)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Folders of a head and its target."""
    return written(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module", params=[HeadKind.EAGLE3, HeadKind.EAGLE2], ids=["EAGLE3", "EAGLE2"])
def eagle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Folders of an EAGLE head, which has attention and reads weights of its target."""
    return written(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> HeadRunner:
    return load(folders)


@pytest.fixture
def drafter(model: HeadRunner) -> Iterator[HeadDrafter]:
    made = HeadDrafter(model)
    yield made
    made.check_integrity()
    made.drop(PEER)
    made.check_integrity()
    assert model.rows.open_rows == 0


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> tuple[AnyHead, torch.Tensor]:
    """The head, and the target's embeddings."""
    if read(folders[0]).kind is HeadKind.MEDUSA:
        medusa = checkpoint.load_medusa(folders[0], torch.float32, torch.device("cpu"))
        return medusa, torch.empty(0)
    target = LlamaForCausalLM.from_pretrained(folders[1]).eval()
    embedding = target.model.embed_tokens.weight
    if read(folders[0]).kind is HeadKind.HYDRA:
        return checkpoint.load_hydra(folders[0], torch.float32, torch.device("cpu")), embedding
    head = checkpoint.load(folders[0], torch.float32, torch.device("cpu"))
    if isinstance(head, Eagle2Head):
        head.lm_head = target.lm_head.weight
    return head, embedding


def states(begin: int, end: int, submission: int = 1) -> States:
    data: NDArray[Any] = STATES[begin:end].view(torch.int16).numpy()
    return States(submission, begin, data.tobytes())


def submit(prompt: int, submission: int = 1, **more: Any) -> Submit:
    return Submit(submission, TEXT[:prompt], 0, 100, 0, 0.0, **more)


def commit(base: int, tokens: Sequence[int], wanted: int = 3, submission: int = 1) -> Commits:
    return Commits([Commit(submission, base, list(tokens), wanted)])


def run(drafter: HeadDrafter, *messages: Any) -> list[FromSidecar]:
    """What the drafter sends after messages of PEER."""
    for message in messages:
        drafter.handle(PEER, message)
    while not drafter.idle:
        drafter.step()
        drafter.check_integrity()
    return [message for _, message in drafter.take()]


def tokens_of(messages: Sequence[FromSidecar], submission: int = 1) -> list[int]:
    """The tokens of one draft, which must be complete."""
    drafted = [m for m in messages if isinstance(m, Drafted) and m.submission == submission]
    assert [each.finished for each in drafted] == [False] * (len(drafted) - 1) + [True]
    assert len({each.completion for each in drafted}) == 1
    assert drafted[0].completion >= MAX_COMPLETIONS
    found: list[int] = []
    for each in drafted:
        assert each.start == len(found)
        found += each.token_ids
    return found


def test_it_drafts_as_the_head_does(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor]
) -> None:
    found = run(drafter, submit(10), states(0, 10), commit(0, TEXT[10:11]))
    assert tokens_of(found) == drafts_of(reference, 11, 3)
    seconds = [each.second_ids for each in found if isinstance(each, Drafted)]
    assert seconds == [[second] for _, second in choices_of(reference, 11, 3)]
    # Two tokens are accepted: what was drafted is read again behind the target's states.
    found = run(drafter, states(10, 13), commit(1, TEXT[11:14], 5))
    assert tokens_of(found) == drafts_of(reference, 14, 5)
    assert isinstance(found[0], Drafted)
    assert (found[0].base_len, found[0].known_len) == (4, 4)
    assert drafter.statistics.drafted_tokens == 8


def test_an_idle_drafter_advances_nothing(drafter: HeadDrafter) -> None:
    advanced: list[int] = []
    for message in (submit(10), states(0, 10), commit(0, TEXT[10:11])):
        drafter.handle(PEER, message)

    def ends() -> bool:
        advanced.append(drafter.advanced)
        return False

    drafter.step(ends)
    assert advanced
    assert set(advanced) == {1}
    assert drafter.idle
    assert drafter.advanced == 0


def test_texts_of_several_requests_share_passes(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor]
) -> None:
    messages = []
    for number, prompt in ((1, 5), (2, 30), (3, 12)):
        messages += [submit(prompt, number), states(0, prompt, number)]
    commits = Commits([Commit(n, 0, [TEXT[p]], 1 + n) for n, p in ((1, 5), (2, 30), (3, 12))])
    found = run(drafter, *messages, commits)
    for number, prompt in ((1, 5), (2, 30), (3, 12)):
        assert tokens_of(found, number) == drafts_of(reference, prompt + 1, 1 + number)
    assert drafter.statistics.step_passes == 4


def test_states_may_come_in_parts_twice_and_late(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor]
) -> None:
    assert run(drafter, submit(10), states(0, 4), states(2, 8)) == []
    found = run(drafter, commit(0, TEXT[10:11]))
    assert tokens_of(found) == []  # the server does not wait for a draft
    found = run(drafter, states(8, 11), commit(1, TEXT[11:12]))
    assert tokens_of(found) == drafts_of(reference, 12, 3)


@pytest.mark.parametrize("begin", [4, 6])
def test_a_cached_prefix_has_no_states(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor], begin: int
) -> None:
    found = run(drafter, submit(10), states(begin, 10), commit(0, TEXT[10:11]))
    assert tokens_of(found) == drafts_of(reference, 11, 3, begin)


def test_the_head_begins_anew_behind_a_gap(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor]
) -> None:
    run(drafter, submit(10), states(0, 10), commit(0, TEXT[10:11]))
    found = run(drafter, states(12, 14), commit(1, TEXT[11:15]))
    assert tokens_of(found) == drafts_of(reference, 15, 3, 12)


def test_one_state_is_too_few(drafter: HeadDrafter) -> None:
    run(drafter, submit(10), states(0, 10), commit(0, TEXT[10:11]))
    assert tokens_of(run(drafter, commit(1, TEXT[11:12]))) == []


def test_sampled_drafts_have_the_seed_of_the_request(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor]
) -> None:
    seeded = SeededSampling(seed=7, temperature=1.0)
    messages = [states(0, 10), commit(0, TEXT[10:11])]
    first = tokens_of(run(drafter, submit(10, seeded=seeded), *messages))
    assert first == tokens_of(run(drafter, submit(10, seeded=seeded), *messages))
    assert first != drafts_of(reference, 11, 3)
    chances = SeededSampling(seed=0, temperature=1.0, probabilities=True)
    found = run(drafter, submit(10, seeded=chances), *messages)
    head = set(reference[0].target_ids.tolist())
    for message in found:
        assert isinstance(message, Drafted)
        (candidates,) = message.candidates
        assert message.token_ids[0] in candidates.token_ids
        assert set(candidates.token_ids) <= head


def test_a_stop_token_ends_a_draft(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor]
) -> None:
    expected = drafts_of(reference, 11, 3)
    stops = [expected[1]]
    found = run(drafter, submit(10, stop_token_ids=stops), states(0, 10), commit(0, TEXT[10:11]))
    assert tokens_of(found) == expected[: expected.index(expected[1]) + 1]


def test_what_it_does_not_have(drafter: HeadDrafter) -> None:
    assert run(drafter, commit(0, [1])) == [Gap(1, None)]
    assert run(drafter, states(0, 4), Close(9)) == []
    run(drafter, submit(10))
    assert run(drafter, commit(3, [1])) == [Gap(1, 0)]
    assert run(drafter, commit(0, [1], 0)) != []
    assert run(drafter, commit(0, [1])) == []  # it is known


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([submit(10), States(1, 0, b"x" * 100)], "another width than 64"),
        ([submit(10), states(0, 10), States(1, 60, bytes(2 * WIDTH * 5))], "does not fit"),
        ([Submit(1, [1] * 64, 0, 1, 0, 0.0)], "does not fit"),
        ([submit(10), commit(0, [1] * 54)], "no longer fits"),
    ],
)
def test_what_does_not_fit_is_declined(
    drafter: HeadDrafter, messages: list[Any], reason: str
) -> None:
    found = [each for each in run(drafter, *messages) if isinstance(each, Declined)]
    assert [reason in each.reason for each in found] == [True]
    assert (drafter.texts, drafter.declined) == (0, 1)


def test_a_full_kv_declines_what_has_no_room(folders: tuple[Path, Path]) -> None:
    drafter = HeadDrafter(load(folders, kv_slots=40))
    messages = [(submit(20, n), states(0, 20, n), commit(0, TEXT[20:21], 3, n)) for n in (1, 2)]
    found = run(drafter, *(each for part in messages for each in part))
    assert len(tokens_of(found, 1)) == 3
    assert [each.submission for each in found if isinstance(each, Declined)] == [2]


def test_a_failed_pass_declines_its_requests(
    drafter: HeadDrafter, model: HeadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for message in (submit(10), states(0, 10), commit(0, TEXT[10:11])):
        drafter.handle(PEER, message)
    monkeypatch.setattr(model, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drafter.step()
    assert drafter.idle
    assert [type(message).__name__ for _, message in drafter.take()][-1] == "Declined"


def test_texts_of_a_server_are_limited(model: HeadRunner) -> None:
    drafter = HeadDrafter(model, max_server_tokens=25)
    assert run(drafter, submit(10), submit(10, 2)) == []
    (declined,) = run(drafter, submit(10, 3))
    assert isinstance(declined, Declined)
    assert declined.retry


def test_it_times_its_passes_before_it_serves(drafter: HeadDrafter) -> None:
    drafter.warm_up()
    assert [size for size, _ in drafter.statistics.step_times] == [1, 2, 4]
    assert drafter.statistics.read_seconds > 0


def test_a_target_of_another_width_is_refused(eagle: tuple[Path, Path], tmp_path: Path) -> None:
    head, target = eagle
    with pytest.raises(ConfigError, match="has no weight that ends with embed_tokens.weight"):
        HeadModel(HeadOptions(head, tmp_path))
    checkpoint.save(random_head(), tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"vocab_size": 260', '"vocab_size": 300'))
    with pytest.raises(ConfigError, match=r"shape \[260, 64\], but the head needs \[300, 64\]"):
        HeadModel(HeadOptions(tmp_path, target))


def test_a_sidecar_needs_the_target_of_its_head(folders: tuple[Path, Path]) -> None:
    options = parser().parse_args([f"--model-path={folders[0]}", "--endpoint=ipc:///tmp/x"])
    with pytest.raises(ConfigError, match="so --target-path must be the folder of its target"):
        service._models(options, "cpu")


def test_a_head_has_no_head_of_its_own(folders: tuple[Path, Path]) -> None:
    head, target = map(str, folders)
    given = [f"--model-path={head}", f"--target-path={target}", f"--draft-model-head={head}"]
    options = parser().parse_args([*given, "--endpoint=ipc:///tmp/x"])
    words = f"--draft-model-head is {head!r}, but --model-path is the head {head}: it must be a"
    with pytest.raises(ConfigError, match=f"^{re.escape(words)} draft model$"):
        service._models(options, "cpu")


def test_only_a_hydra_head_on_a_cpu_drafts_for_a_draft_model(folders: tuple[Path, Path]) -> None:
    head, target = map(str, folders)
    given = [f"--model-path={target}", f"--draft-model-head={head}", "--endpoint=ipc:///tmp/x"]
    options = parser().parse_args(given)
    refused = {"cuda": "a draft model has a head on a CPU alone (--device cpu)"}
    if read(folders[0]).kind is not HeadKind.HYDRA:
        refused["cpu"] = "must be the folder of a Hydra head"
    for device, words in refused.items():
        words = f"--draft-model-head is {head!r}, but {words}"
        with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
            service._models(options, device)


@pytest.mark.parametrize("together", [16, 1])
def test_rows_attend_alike_together_and_apart(
    eagle: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    given = [TEXT[1:13], TEXT[1:4]]
    data = np.concatenate([STATES[: len(each)].view(torch.int16).numpy() for each in given])
    found = []
    for limit in (16, together):
        monkeypatch.setattr(head_model, "TOGETHER", limit)
        monkeypatch.setattr(head_model, "APART", 5)
        model = HeadModel(HeadOptions(*eagle, kv_slots=300, batch=4, context_len=64))
        rows = [model.rows.open(), model.rows.open()]
        found.append(model.extend(rows, given, data).logits)
    torch.testing.assert_close(found[0], found[1])


def test_the_vocabulary_is_the_targets(model: HeadRunner) -> None:
    assert (model.vocab_size, model.width) == (VOCAB, WIDTH)
    assert model.fingerprint() == model.fingerprint() != ""


def test_a_draft_of_medusa_heads_has_a_token_of_each(
    drafter: HeadDrafter, reference: tuple[AnyHead, torch.Tensor]
) -> None:
    found = run(drafter, submit(10), states(0, 10), commit(0, TEXT[10:11], 8))
    most = 5 if isinstance(reference[0], MedusaHeads) else 8
    assert tokens_of(found) == drafts_of(reference, 11, most)


@pytest.mark.parametrize("seed", range(2))
def test_any_messages_leave_it_consistent(model: HeadRunner, seed: int) -> None:
    rng = random.Random(seed)
    peers = [PEER, Peer("other", b"2", VOCAB - 100)]
    drafter, frames = HeadDrafter(model), Frames(rng, VOCAB, 70, WIDTH)
    drafted = 0
    for _ in range(150):
        peer = rng.choice(peers)
        drafter.handle(peer, frames.from_a_server())
        if drafter.texts and rng.random() < 0.5:  # what a server would send next
            (peer, submission), text = rng.choice(list(drafter._texts._texts.items()))
            rest = rng.randbytes(2 * WIDTH * (len(text.token_ids) - text.known))
            drafter.handle(peer, States(submission, text.known, rest))
            drafter.handle(peer, commit(text.output_len, [rng.randrange(100)], 4, submission))
        if rng.random() < 0.01:
            drafter.drop(peer)
        while not drafter.idle and rng.random() < 0.7:
            drafter.step()
        drafter.check_integrity()
        for receiver, message in drafter.take():
            if isinstance(message, Drafted):
                assert max(message.token_ids, default=0) < receiver.vocab_size
                drafted += len(message.token_ids)
    assert drafted
    for peer in peers:
        drafter.drop(peer)
    assert model.rows.open_rows == 0
