"""The choice of the pipeline."""

from sglang_qspec.policy import PassCost, PassTimes, PipelinePlan, PipelineSelector
from sglang_qspec.policy.pipeline_selector import PERIOD, VOTES

SETTLED = PERIOD * (VOTES + 1)
GOOD, BAD = 0.97, 0.5


def times(cost: PassCost, one_row: float) -> PassTimes:
    measured = PassTimes(cost)
    measured.observe(1, 1, one_row)
    return measured


FLAT = PassCost(cheap_row=0.0, row=0.0)
STEEP = PassCost(cheap_rows=0, row=1.0)
"""The time of a pass is nearly proportional to its rows."""


def plan(
    selector: PipelineSelector, requests: int, agreement: float, step: float, rounds: int = SETTLED
) -> list[str]:
    return [
        selector.choose(
            requests,
            widest=5,
            fixed=False,
            lookahead=16,
            agreement=agreement,
            step_times=[(1.0, step), (2.0 * requests, 2 * step)],
        ).pipeline
        for _ in range(rounds)
    ]


def test_ahead_is_chosen_where_a_pass_takes_the_same_time_for_twice_the_requests() -> None:
    assert set(plan(PipelineSelector(times(FLAT, 0.04)), 8, GOOD, step=0.01)) == {"ahead"}


def test_halves_is_chosen_where_pass_time_doubles_with_requests_and_drafts_often_fail() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    assert plan(selector, 8, BAD, step=0.016)[-1] == "halves"


def test_the_pipeline_changes_only_after_several_wins_in_a_row() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    chosen = plan(selector, 8, BAD, step=0.016, rounds=PERIOD * VOTES - 1)
    assert set(chosen) == {"ahead"}
    chosen = plan(selector, 8, BAD, step=0.016, rounds=20 * PERIOD)
    assert set(chosen) == {"halves"}
    plan(selector, 8, GOOD, step=0.0001, rounds=PERIOD)
    assert plan(selector, 8, BAD, step=0.016, rounds=PERIOD)[-1] == "halves"


def test_each_batch_size_has_its_own_pipeline() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    plan(selector, 8, BAD, step=0.016)
    assert plan(selector, 2, GOOD, step=0.0001)[-1] == "ahead"
    assert plan(selector, 8, BAD, step=0.016, rounds=1) == ["halves"]


def test_one_request_or_missing_measurements_give_ahead() -> None:
    selector = PipelineSelector(times(STEEP, 0.004))
    assert set(plan(selector, 1, BAD, step=0.016)) == {"ahead"}
    unmeasured = selector.choose(
        8, widest=5, fixed=False, lookahead=16, agreement=BAD, step_times=[]
    )
    assert unmeasured == PipelinePlan("ahead", 5)


def test_halves_limit_the_width_to_what_pays_unless_the_width_is_fixed() -> None:
    for fixed, width in ((False, 2), (True, 16)):
        selector = PipelineSelector(times(STEEP, 0.004))
        for _ in range(SETTLED):
            chosen = selector.choose(
                8,
                widest=16,
                fixed=fixed,
                lookahead=16,
                agreement=BAD,
                step_times=[(1.0, 0.006), (16.0, 0.016)],
            )
        assert chosen == PipelinePlan("halves", width)
