"""The proposal of a pipeline."""

from collections.abc import Callable, Sequence

import pytest

from sglang_qspec.policy import PassCost, PassTimes, PipelinePlan, PipelineSelector
from sglang_qspec.policy.pipeline_selector import LONGEST_PERIOD, PERIOD, VOTES

SETTLED = PERIOD * (VOTES + 1)
GOOD, BAD = 0.97, 0.5


def times(cost: PassCost, one_row: float) -> PassTimes:
    measured = PassTimes(cost)
    measured.observe(1, 1, one_row)
    return measured


FLAT = PassCost(cheap_row=0.0, row=0.0)
STEEP = PassCost(cheap_rows=0, row=1.0)
"""The time of a pass is nearly proportional to its rows."""


def propose(
    selector: PipelineSelector,
    requests: int,
    agreement: float,
    step_times: Sequence[tuple[float, float]],
    *,
    widest: int = 5,
    fixed: bool = False,
    splits: Callable[[], bool] = lambda: True,
) -> str:
    return selector.propose(
        requests,
        splits=splits,
        widest=widest,
        fixed=fixed,
        lookahead=16,
        agreement=agreement,
        step_times=step_times,
    )


def proposed(
    selector: PipelineSelector,
    requests: int,
    agreement: float,
    step: float,
    rounds: int = SETTLED,
    splits: Callable[[], bool] = lambda: True,
) -> list[str]:
    steps = [(1.0, step), (2.0 * requests, 2 * step)]
    return [propose(selector, requests, agreement, steps, splits=splits) for _ in range(rounds)]


def test_ahead_stays_where_a_pass_takes_the_same_time_for_twice_the_requests() -> None:
    found = proposed(PipelineSelector(times(FLAT, 0.04)), 8, GOOD, step=0.01)
    assert set(found) == {"ahead"}


def test_halves_is_proposed_where_pass_time_doubles_with_requests_and_drafts_often_fail() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    assert proposed(selector, 8, BAD, step=0.016)[-1] == "halves"


def test_a_batch_that_cannot_be_split_has_no_proposal_of_halves() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    found = proposed(selector, 8, BAD, step=0.016, splits=lambda: False)
    assert "halves" not in found


def test_whether_a_batch_splits_is_asked_in_comparisons_only() -> None:
    """The answer looks at each request of the batch."""
    asked: list[None] = []

    def splits() -> bool:
        asked.append(None)
        return True

    proposed(PipelineSelector(times(STEEP, 0.004)), 8, BAD, step=0.016, splits=splits)
    assert len(asked) == SETTLED // PERIOD


def test_a_proposal_needs_several_wins_in_a_row() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    found = proposed(selector, 8, BAD, step=0.016, rounds=PERIOD * VOTES - 1)
    assert set(found) == {"ahead"}
    found = proposed(selector, 8, BAD, step=0.016, rounds=20 * PERIOD)
    assert set(found) == {"halves"}
    assert proposed(selector, 8, GOOD, step=0.0001, rounds=PERIOD)[-1] == "ahead"
    assert proposed(selector, 8, BAD, step=0.016, rounds=PERIOD)[-1] == "ahead"


def test_each_batch_size_has_its_own_proposal() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    proposed(selector, 8, BAD, step=0.016)
    assert proposed(selector, 2, GOOD, step=0.0001)[-1] == "ahead"
    assert proposed(selector, 8, BAD, step=0.016, rounds=1) == ["halves"]


def test_one_request_or_missing_measurements_give_ahead() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    assert set(proposed(selector, 1, BAD, step=0.016)) == {"ahead"}
    assert {propose(selector, 8, BAD, []) for _ in range(SETTLED)} == {"ahead"}


@pytest.mark.parametrize(("fixed", "width"), [(False, 2), (True, 16)])
def test_halves_limit_the_width_to_what_pays_unless_the_width_is_fixed(
    fixed: bool, width: int
) -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    steps = [(1.0, 0.006), (16.0, 0.016)]
    assert selector.plan(8, "halves", 16) == PipelinePlan("halves", 16), "nothing is known yet"
    for _ in range(SETTLED):
        propose(selector, 8, BAD, steps, widest=16, fixed=fixed)
    assert selector.plan(8, "halves", 16) == PipelinePlan("halves", width)
    assert selector.plan(8, "ahead", 16) == PipelinePlan("ahead", 16)


def test_comparisons_become_rare_while_the_first_pipeline_wins() -> None:
    compared: list[None] = []

    def splits() -> bool:
        compared.append(None)
        return True

    selector = PipelineSelector(times(FLAT, 0.04))
    proposed(selector, 8, GOOD, step=0.01, rounds=4 * LONGEST_PERIOD, splits=splits)
    before = len(compared)
    proposed(selector, 8, GOOD, step=0.01, rounds=4 * LONGEST_PERIOD, splits=splits)
    assert len(compared) - before == 4
