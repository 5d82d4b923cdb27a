"""The figures of `bench_worst_case`."""

from __future__ import annotations

import pytest

from benchmark.harness.run import Answer, Run
from benchmark.worst.cases import ADAPTIVE, BASELINE, Cell
from benchmark.worst.summary import Summary


def run_of(number: int, config: str, rate: float) -> Run:
    """A run of a hundred tokens; with speculation it takes 50 passes with 3 draft tokens each."""
    passes = 99 if config == BASELINE else 50
    drafts = 0 if config == BASELINE else passes
    one = Answer((7,) * 100, 1.0, 1.0, passes, 3 * drafts, {"guess": drafts})
    return Run(100 / rate, (one,), 0.01 * number)


def rounds(case: str, running: int, rates: dict[str, list[float]]) -> dict[Cell, Run]:
    return {
        Cell(number, case, running, config): run_of(number, config, rate)
        for config, found in rates.items()
        for number, rate in enumerate(found, 1)
    }


def test_a_ratio_is_the_median_of_per_round_ratios_and_has_a_spread() -> None:
    # In the second round the machine ran at half its speed.
    runs = rounds("random-text", 8, {BASELINE: [100, 50, 100], ADAPTIVE: [101, 49, 120]})
    plain, adaptive = Summary(runs).rows
    assert plain.ratio is None
    assert (plain.accept_length, plain.proposed_per_pass) == (1.0, 0.0)
    assert str(adaptive.ratio) == "1.01 (0.98 to 1.20)"
    assert (adaptive.accept_length, adaptive.proposed_per_pass) == (2.0, 3.0)
    assert adaptive.others_share == pytest.approx(0.03)
    assert adaptive.record()["ratio_spread"] == [0.98, 1.2]


def test_the_worst_ratio_is_over_all_cases_and_levels() -> None:
    runs = rounds("random-text", 1, {BASELINE: [100], ADAPTIVE: [98]})
    runs |= rounds("random-text", 8, {BASELINE: [100], ADAPTIVE: [150]})
    runs |= rounds("long-context", 8, {BASELINE: [100], ADAPTIVE: [99]})
    record = Summary(runs).record()
    assert (record["worst_ratio"], record["worst_ratio_spread"]) == (0.98, None)


def test_the_adaptive_width_is_compared_with_the_fastest_fixed_one_of_each_level() -> None:
    widths = {"width-2": [100.0, 100.0], "width-8": [200.0, 210.0]}
    runs = rounds("spec-bench", 1, {ADAPTIVE: [210.0, 210.0], **widths})
    found = Summary(runs).adaptive_over_best_fixed_min
    assert found is not None
    assert found.values == pytest.approx((1.05, 1.0))
    runs |= rounds("spec-bench", 8, {ADAPTIVE: [99.0], "width-2": [100.0], "width-8": [80.0]})
    assert str(Summary(runs).adaptive_over_best_fixed_min) == "0.99 (one round)"


def test_cases_that_were_not_served_have_no_figure() -> None:
    summary = Summary(rounds("random-text", 1, {ADAPTIVE: [100.0]}))
    assert summary.rows[0].ratio is None
    assert summary.worst_ratio is None
    assert summary.adaptive_over_best_fixed_min is None
    assert Summary({}).record()["rows"] == []
    report = summary.report({}, {})
    assert "random-text" in report.text()
    assert "| random-text | 1 | adaptive |" in report.markdown()


def test_the_chart_has_a_line_for_each_case_without_the_fixed_widths() -> None:
    pytest.importorskip("matplotlib")
    rates = {BASELINE: [100.0], ADAPTIVE: [150.0], "width-4": [140.0]}
    runs = rounds("spec-bench", 1, rates) | rounds("random-text", 1, rates)
    (figure,) = Summary(runs).figures()
    assert "Spec-Bench" in (figure.svg or "")
    assert "width-4" not in (figure.svg or "")
    assert [empty.svg for empty in Summary({}).figures()] == [None]
