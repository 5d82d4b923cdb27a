"""Arbitrary frames from a sidecar, while requests arrive, run, are retracted and aborted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from test.engine.chaos import VOCAB
from test.fuzz.examples import examples
from test.fuzz.frames import Frames, Record, records
from test.fuzz.server_end import TEXT_LEN, ServerEnd

runs = records(VOCAB, TEXT_LEN, to_sidecar=False)
seeds = st.integers(0, 1000)


@pytest.mark.timeout(3600)
@examples(0.5)
@given(runs, seeds)
def test_every_answer_is_the_targets_whatever_frames_a_sidecar_sends(
    run: list[Record], seed: int
) -> None:
    ServerEnd().run(run, seed)


def test_the_runs_have_accepted_and_refused_frames() -> None:
    """Without accepted drafts and refused frames, the tests above would prove little."""
    end = ServerEnd()
    for seed in range(20):
        rng = random.Random(seed)
        frames = Frames(rng, VOCAB, TEXT_LEN)
        end.run([(rng.randrange(256), frames.from_sidecar()) for _ in range(60)], seed)
    assert end.malformed > end.frames / 10
    assert end.finished > 50
    assert end.accepted > 100
