"""Pipelines are compared with each other, with their bound, and with the targets."""

from __future__ import annotations

import pytest

from benchmark.harness.statistics import Ratio
from benchmark.parallel.comparisons import Comparison, auto_speedups, balanced, compare
from benchmark.parallel.measures import Results
from benchmark.parallel.targets import Target, targets
from test.benchmark.parallel.cells import Runs, block_runs, one_run, together


def one(verify_s: float, draft_s: float, ratio: float = 1.5) -> Comparison:
    return Comparison(4, 4, "halves", Ratio((ratio,)), Ratio((1.4,)), verify_s, draft_s)


@pytest.mark.parametrize(
    ("verify_s", "draft_s", "bound"), [(0.03, 0.03, 2.0), (0.03, 0.01, 4 / 3), (0.01, 0.04, 1.25)]
)
def test_hiding_all_drafting_gives_at_most_the_bound(
    verify_s: float, draft_s: float, bound: float
) -> None:
    assert one(verify_s, draft_s).bound == pytest.approx(bound)
    assert one(verify_s, draft_s, ratio=bound / 2).of_bound == pytest.approx(0.5)


def test_the_balanced_cell_has_the_closest_drafting_and_verify_times() -> None:
    longer_drafts, longer_passes, near = one(0.01, 0.04), one(0.04, 0.02), one(0.03, 0.02)
    assert balanced([longer_drafts, longer_passes, near]) is near
    assert balanced([]) is None


def test_both_comparisons_use_the_draft_times_of_sequential() -> None:
    found = compare(Results(block_runs()))
    (paper,) = found.paper
    assert paper.ratio.median == pytest.approx(30 / 16)
    assert paper.bound == pytest.approx(2.0)
    assert paper.whole_ratio.median < paper.ratio.median
    assert {c.pipeline: round(c.ratio.median, 3) for c in found.same_in_flight} == {
        "halves": 1.5,
        "ahead": 1.35,
    }
    assert [c.pipeline for c in found.best] == ["halves"]


def test_the_choice_of_auto_is_compared_with_the_best_pipeline_that_it_could_choose() -> None:
    runs = together(block_runs(), one_run("queue", decoded_per_s=60.0))
    auto, auto_step = compare(Results(runs)).choices
    assert (auto.config, auto.best) == ("auto", "queue")
    assert auto.ratio.median == pytest.approx(29.4 / 60)
    assert (auto_step.config, auto_step.best) == ("auto-step", "halves")
    assert auto_step.ratio.median == pytest.approx(1.0)


def test_comparisons_leave_out_cells_that_were_not_served() -> None:
    found = compare(Results(together(one_run("none"), one_run("halves"), one_run("auto"))))
    assert (found.paper, found.same_in_flight) == ((), ())
    assert [c.best for c in found.choices] == ["halves"]


def test_auto_counts_at_the_largest_k_with_its_prompts_and_at_equal_hardware() -> None:
    runs = together(
        *(one_run(name, in_flight=2) for name in ("none", "none-equal")),
        one_run("auto", in_flight=2, k=1, decoded_per_s=99),
        one_run("auto", in_flight=2, k=8, decoded_per_s=30),
    )
    speedup, equal = auto_speedups(Results(runs))[2]
    assert equal is not None
    assert speedup.median == pytest.approx((60 / 10 + 0.5) / (60 / 30 + 0.5))
    assert equal.median == pytest.approx((60 / 15 + 0.5) / (60 / 30 + 0.5))


def judged(*runs: Runs) -> list[Target]:
    results = Results(together(*runs))
    return targets(results, compare(results))


def test_targets_that_are_reached_are_met() -> None:
    blocks = [block_runs(in_flight=level) for level in (2, 4, 8)]
    fast = [
        one_run(name, in_flight=level, decoded_per_s=36.0)
        for level in (2, 4, 8)
        for name in ("halves", "auto")
    ]
    met = {target.goal: target.met for target in judged(*blocks, *fast)}
    # 36 / 16 is above the bound; 36 / 20 is 90 % of it.
    assert all(met.values())


def test_targets_that_are_missed_say_where() -> None:
    paper, of_bound, nearly, hidden, choice, *speedups = judged(block_runs())
    assert (paper.met, of_bound.met, nearly.met, hidden.met, choice.met) == (
        *(False, False, True, True),
        True,
    )
    assert paper.found.startswith("halves, k = 4, 4 in flight: 1.88 (one round), 94% of 2.00")
    assert (
        "1 of 1 are not: halves, k = 4, 4 in flight: 1.50 (one round), 75% of 2.00"
        in of_bound.found
    )
    assert [target.met for target in speedups] == [None, True, None]


def test_drafting_must_be_hidden_only_where_it_takes_at_most_the_verify_time() -> None:
    waits = [one_run(name, waited_s=0.015) for name in ("halves", "sequential")]
    slow = [one_run(name, draft_s=0.05, waited_s=0.02) for name in ("halves", "ahead")]
    assert judged(*waits)[3].met is False
    assert "halves, k = 4, 4 in flight: 50%" in judged(*waits)[3].found
    assert judged(*slow)[3].met is None


def test_targets_for_batches_leave_out_a_single_request() -> None:
    entries = [one_run(name, in_flight=1) for name in ("sequential", "ahead")]
    assert [target.met for target in judged(*entries)[1:3]] == [None, None]
    assert len(compare(Results(together(*entries))).same_in_flight) == 1


def test_a_target_without_measurements_is_neither_met_nor_missed() -> None:
    assert {target.met for target in judged()} == {None}
