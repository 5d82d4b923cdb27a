"""A draft model completes waiting prompts, and a head drafts for served ones, in one sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.heads import checkpoint
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Admit,
    Close,
    Commit,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    States,
    Submit,
)
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.head_drafter import HeadDrafter
from sglang_qspec.sidecar.head_model import HeadModel
from sglang_qspec.sidecar.head_runner import HeadOptions
from sglang_qspec.sidecar.pair_drafter import PairDrafter
from test.heads.tiny import VOCAB, random_head, write_target
from test.sidecar.scripted import ScriptedModel

PEER = Peer("server", b"1", VOCAB)
PROMPT = [3, 4, 5]
WIDTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HeadModel:
    folder = tmp_path_factory.mktemp("models")
    (folder / "head").mkdir()
    checkpoint.save(random_head(), folder / "head", torch.float32)
    target: Path = write_target(folder / "target")
    return HeadModel(HeadOptions(folder / "head", target, kv_slots=300, batch=4, context_len=64))


@pytest.fixture
def pair(model: HeadModel) -> Iterator[PairDrafter]:
    drafts = Drafter(ScriptedModel(vocab_size=VOCAB, context_len=60), steps=False)
    made = PairDrafter(drafts, HeadDrafter(model, statistics=drafts.statistics))
    yield made
    made.check_integrity()
    made.drop(PEER)
    made.check_integrity()
    assert (made.texts, made.requests, made.advanced) == (0, 0, 0)
    assert made.idle


def submit(token_ids: list[int], number: int = 1, base: int = 0) -> Submit:
    return Submit(number, token_ids, base, 6, 2, 0.6)


def states(begin: int, end: int) -> States:
    data = np.ones((end - begin, WIDTH), np.int16)
    return States(1, begin, data.tobytes())


def run(pair: PairDrafter, *messages: Any) -> list[FromSidecar]:
    for message in messages:
        pair.handle(PEER, message)
    found = [message for _, message in pair.take()]
    while not pair.idle:
        pair.step()
        pair.check_integrity()
        found += [message for _, message in pair.take()]
    return found


def drafted(messages: list[FromSidecar]) -> tuple[list[int], list[int]]:
    """The tokens of the first completion, and those of step drafts."""
    found: tuple[list[int], list[int]] = ([], [])
    for message in messages:
        assert isinstance(message, Drafted)
        if message.completion == 0 or message.completion >= MAX_COMPLETIONS:
            found[message.completion > 0].extend(message.token_ids)
    return found


def test_each_drafts_its_part(pair: PairDrafter) -> None:
    assert drafted(run(pair, submit(PROMPT))) == ([6, 7, 8, 9, 10, 11], [])
    # The draft model said 6, so it would begin anew if it made step drafts.
    served = run(pair, Admit(1), states(0, 3), Commits([Commit(1, 0, [50], 3)]))
    completion, steps = drafted(served)
    assert not completion
    assert len(steps) == 3
    assert pair.statistics.step_tokens == 3
    assert pair.statistics.drafted_tokens == 12 + 3


def test_the_head_comes_first_and_the_draft_model_goes_on(pair: PairDrafter) -> None:
    pair.handle(PEER, submit(PROMPT))
    pair.step()
    for message in (states(0, 3), Commits([Commit(1, 0, [6], 3)])):
        pair.handle(PEER, message)
    pair.take()
    pair.step()
    completion, steps = drafted([message for _, message in pair.take()])
    assert (len(completion), len(steps)) == (0, 3)
    assert not pair.idle
    assert drafted(run(pair))[0]


def test_a_text_that_one_declines_leaves_both(pair: PairDrafter) -> None:
    long = [7] * 62  # the head takes it, and the draft model does not
    (declined,) = run(pair, submit(long))
    assert isinstance(declined, Declined)
    assert pair.declined == 1
    (declined,) = run(pair, submit(PROMPT, 2), States(2, 0, b"odd"))
    assert isinstance(declined, Declined)
    assert pair.declined == 2


def test_lacking_output_is_asked_for_once(pair: PairDrafter) -> None:
    run(pair, submit(PROMPT))
    (gap,) = run(pair, Commits([Commit(1, 5, [6], 3)]))
    assert gap == Gap(1, 0)
    (gap,) = run(pair, Commits([Commit(9, 0, [6], 3)]))
    assert gap == Gap(9, None)


def test_an_ended_request_is_forgotten_by_both(pair: PairDrafter) -> None:
    pair.handle(PEER, submit(PROMPT))
    assert not run(pair, Close(1))
    assert pair.idle
