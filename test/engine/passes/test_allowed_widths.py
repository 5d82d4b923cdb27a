"""Passes have only widths that the server allows for the batch, such as those with CUDA graphs."""

from collections.abc import Callable, Sequence

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.proposer import Proposer, any_width
from sglang_qspec.engine.requests.runtime_settings import RuntimeSettings
from sglang_qspec.policy import PassCost, PassTimes, PipelinePlan
from test.engine.passes.test_plain_decode import batch_of
from test.engine.speculating import enqueue, make

FLAT = PassCost(cheap_row=0.0, row=0.0)
"""All passes take equally long, so the widest with another likely token is best."""

Allowed = Callable[[int], Sequence[int] | None]


def width_of(
    allowed: Allowed,
    *,
    planned: int = 16,
    most: int = 16,
    fixed: bool = False,
    most_drafts: int = 9,
) -> int:
    """Width of a pass for one request, whose prompt repeats `most_drafts` tokens."""
    active = make(None)
    enqueue(active, prompt_ids=[*range(20, 20 + most_drafts)] * 2, max_new_tokens=100)
    settings = RuntimeSettings.of(QSpecConfig(width="fixed" if fixed else "adaptive"), most)
    batch = batch_of({"temperature": 0})
    batch.reqs[0].output_ids = [19 + most_drafts]
    proposer = Proposer(active, settings, PassTimes(FLAT), widths=allowed)
    return proposer.propose(batch, PipelinePlan("ahead", planned)).trees.width


def of(*widths: int) -> Allowed:
    return lambda _: widths


def test_the_policy_chooses_among_the_allowed_widths() -> None:
    free = width_of(any_width)
    assert free > 3
    assert width_of(of(1, 3)) == 3
    assert width_of(of(1, free + 1, 16)) == free + 1
    assert width_of(of(1)) == 1


def test_a_width_between_two_allowed_ones_becomes_the_next() -> None:
    assert width_of(any_width, planned=3) == 3
    assert width_of(of(1, 4), planned=3) == 4
    assert width_of(of(1, 2), planned=3) == 2


@pytest.mark.parametrize(
    ("allowed", "most", "width"),
    [(any_width, 6, 6), (of(1, 4, 8), 6, 4), (of(1, 4, 8), 8, 8), (of(4, 8), 2, 4)],
)
def test_a_fixed_width_is_the_largest_allowed_one(allowed: Allowed, most: int, width: int) -> None:
    assert width_of(allowed, planned=most, most=most, fixed=True) == width


def test_the_allowed_widths_depend_on_the_size_of_the_batch() -> None:
    asked = []

    def allowed(requests: int) -> Sequence[int]:
        asked.append(requests)
        return (1, 2)

    assert width_of(allowed) == 2
    assert asked == [1]
