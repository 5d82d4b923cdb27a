"""The real drafter and its loop under any messages of three servers, departures and failures.

The drafts are the model's continuations of the texts that the server submitted and committed, and
nothing is kept of departed servers (`SidecarEnd`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from test.fuzz.examples import examples
from test.fuzz.frames import Frames, Record, records
from test.fuzz.sidecar_end import CONTEXT, VOCAB, SidecarEnd

runs = records(VOCAB, CONTEXT - 10, to_sidecar=True)
options = st.fixed_dictionaries(
    {
        "share": st.booleans(),
        "guesses": st.booleans(),
        "apart": st.booleans(),
        "tokens": st.sampled_from((40, 70, 160, 2000)),
        "rows": st.sampled_from((10, 3, 64)),
        "slots": st.sampled_from((6, 1, 64)),
        "prefill_tokens": st.sampled_from((24, 4, 256)),
    }
)


@pytest.mark.timeout(3600)
@examples(0.5)
@given(runs, options)
def test_a_sidecar_survives_any_messages_and_keeps_nothing_of_departed_servers(
    run: list[Record], limits: dict[str, Any]
) -> None:
    SidecarEnd(**limits).run(run)


def test_the_runs_reach_drafts_failures_and_refusals() -> None:
    """Otherwise the tests above would test little."""
    end = SidecarEnd(guesses=True)
    for seed in range(60):
        rng = random.Random(seed)
        frames = Frames(rng, VOCAB, CONTEXT - 10)
        end.run([(rng.randrange(256), frames.to_sidecar()) for _ in range(60)])
    assert end.malformed > end.frames / 10
    assert end.answers > end.frames / 4
    statistics = end.drafter.statistics
    assert statistics.drafted_tokens > end.frames / 4
    assert statistics.step_tokens > end.frames / 200
    assert statistics.guessed_tokens > statistics.right_guesses > end.frames / 200
    assert end.processes_ended > 0
