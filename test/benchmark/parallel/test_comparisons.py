"""Pipelines are compared with each other, and with their bound."""

from __future__ import annotations

import itertools

import pytest

from benchmark.harness.statistics import Ratio
from benchmark.parallel.comparisons import Comparison, auto_speedups, balanced, compare
from benchmark.parallel.figures import timeline
from benchmark.parallel.measures import Results
from test.benchmark.parallel.cells import block_runs, one_run, together


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


def test_a_single_request_is_compared_without_halves() -> None:
    runs = together(*(one_run(name, in_flight=1) for name in ("sequential", "ahead")))
    assert [c.pipeline for c in compare(Results(runs)).same_in_flight] == ["ahead"]


def test_the_timeline_has_the_drafts_before_their_passes() -> None:
    results = Results(block_runs())
    for name in ("sequential", "ahead", "halves"):
        row = results.row(name, {"in_flight": 4, "k": 4})
        assert row is not None
        passes, drafts = timeline(row)
        for verified, drafted in zip(passes, drafts, strict=True):
            assert verified.text == drafted.text
            assert verified.begin >= drafted.begin + drafted.length - 1e-9
        for before, after in itertools.pairwise(passes):
            assert after.begin >= before.begin + before.length - 1e-9
