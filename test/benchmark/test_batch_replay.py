"""Batches of recorded requests, with a given number of rows in a pass."""

from __future__ import annotations

import pytest

from benchmark.batch_replay import Shape, serve
from benchmark.replay import Recorded

TEXT = list(range(1000, 1040))
SURE = Recorded([1, 2, 3], TEXT, [TEXT], [(1, TEXT[1:])])
HOPELESS = Recorded([4, 5, 6], TEXT, [[7] * 40])


@pytest.mark.parametrize("shape", Shape)
def test_a_pass_has_the_given_rows_if_all_drafts_are_long(shape: Shape) -> None:
    found = serve([SURE] * 4, shape, batch=2, width=4, completions=1, steps=1.0)
    passes = found.requests / 2
    assert found.tokens / found.rows == found.per_row
    assert found.accept_length > 3
    assert found.rows <= passes * 8
    if not shape.ragged:
        assert found.rows == passes * 8


def test_ragged_rows_go_to_the_request_whose_drafts_are_right() -> None:
    found = {
        shape: serve([SURE, HOPELESS] * 3, shape, batch=2, width=3, completions=1, steps=0.0)
        for shape in Shape
    }
    assert found[Shape.RAGGED_TREES].per_row > 1.2 * found[Shape.TREES].per_row
    assert found[Shape.RAGGED_CHAINS].per_row > 1.2 * found[Shape.CHAINS].per_row


def test_step_drafts_are_for_the_given_share_of_the_requests() -> None:
    steps = [
        serve([SURE] * 8, Shape.TREES, batch=2, width=8, completions=0, steps=share).accept_length
        for share in (0.0, 0.5, 1.0)
    ]
    assert steps[0] == 1.0
    assert steps[0] < steps[1] < steps[2]


def test_the_batch_is_always_full() -> None:
    found = serve([SURE] * 3, Shape.TREES, batch=4, width=2, completions=1, steps=0.0)
    assert found.requests % 4 == 0
    # At least two batches of requests wait; the last requests stay unfinished.
    assert found.tokens > 4 * len(TEXT) / 2
