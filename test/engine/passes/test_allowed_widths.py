"""Passes have only shapes that the server allows, such as those with CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.decide.proposer import AllShapes, Proposer, Shapes
from sglang_qspec.engine.passes.launch import decode
from sglang_qspec.policy import PassCost, PassTimes, PipelinePlan
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from test.engine.passes.test_plain_decode import batch_of
from test.engine.speculating import enqueue, make

FLAT = PassCost(cheap_row=0.0, row=0.0)
"""All passes take equally long, so the widest with another likely token is best."""


@dataclass
class Captured:
    """Shapes with graphs, in place of a GPU's."""

    allowed: Sequence[int] | None = None
    tiers: Sequence[int] = ()
    asked: list[int] = field(default_factory=list)
    """Batch sizes of the calls of `widths`."""

    def widths(self, requests: int) -> Sequence[int] | None:
        self.asked.append(requests)
        return self.allowed


def width_of(
    allowed: Shapes,
    *,
    ragged: bool = False,
    planned: int = 16,
    most: int = 16,
    fixed: bool = False,
    most_drafts: int = 9,
) -> int:
    """Width of a pass for one request, whose prompt repeats `most_drafts` tokens."""
    active = make(None)
    enqueue(active, prompt_ids=[*range(20, 20 + most_drafts)] * 2, max_new_tokens=100)
    config = QSpecConfig(width="fixed" if fixed else "adaptive")
    settings = RuntimeSettings.of(config, most, ragged=ragged)
    batch = batch_of({"temperature": 0})
    batch.reqs[0].output_ids = [19 + most_drafts]
    proposer = Proposer(active, settings, PassTimes(FLAT), shapes=allowed)
    return decode.propose(proposer, active, batch, PipelinePlan("ahead", planned)).trees.width


def of(*widths: int) -> Captured:
    return Captured(widths)


def test_the_policy_chooses_among_the_allowed_widths() -> None:
    free = width_of(AllShapes())
    assert free > 3
    assert width_of(of(1, 3)) == 3
    assert width_of(of(1, free + 1, 16)) == free + 1
    assert width_of(of(1)) == 1


def test_a_width_between_two_allowed_ones_becomes_the_next() -> None:
    assert width_of(AllShapes(), planned=3) == 3
    assert width_of(of(1, 4), planned=3) == 4
    assert width_of(of(1, 2), planned=3) == 2


@pytest.mark.parametrize(
    ("allowed", "most", "width"),
    [(AllShapes(), 6, 6), (of(1, 4, 8), 6, 4), (of(1, 4, 8), 8, 8), (of(4, 8), 2, 4)],
)
def test_a_fixed_width_is_the_largest_allowed_one(allowed: Shapes, most: int, width: int) -> None:
    assert width_of(allowed, planned=most, most=most, fixed=True) == width


def test_the_allowed_widths_depend_on_the_size_of_the_batch() -> None:
    captured = of(1, 2)
    assert width_of(captured) == 2
    assert captured.asked == [1]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_ragged_pass_has_an_allowed_total_of_rows(*, fixed: bool) -> None:
    free = width_of(AllShapes(), ragged=True, fixed=fixed)
    assert free > 3
    assert width_of(Captured(tiers=(2, 3)), ragged=True, fixed=fixed) == 3
    assert width_of(Captured(tiers=(2, 16)), ragged=True, fixed=fixed) == free
