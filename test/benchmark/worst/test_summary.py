"""What the runs amount to."""

from __future__ import annotations

import pytest

from benchmark.worst.cases import ADAPTIVE, BASELINE
from benchmark.worst.journal import Entry
from benchmark.worst.serving import CellRun
from benchmark.worst.summary import Summary


def entry(number: int, case: str, running: int, config: str, rate: float) -> Entry:
    """A hundred tokens; with speculation, in 50 passes with 3 draft tokens each."""
    passes = 0 if config == BASELINE else 50
    run = CellRun(100 / rate, 100, passes, 3 * passes, passes, 0.0, 0.01 * number)
    return Entry(number, case, running, config, run)


def rounds(case: str, running: int, rates: dict[str, list[float]]) -> list[Entry]:
    return [
        entry(number, case, running, config, rate)
        for config, found in rates.items()
        for number, rate in enumerate(found, 1)
    ]


def test_a_ratio_is_the_median_over_rounds_of_what_was_served_in_one() -> None:
    # The machine was twice as slow in the second round.
    entries = rounds("random-text", 8, {BASELINE: [100, 50, 100], ADAPTIVE: [101, 49, 120]})
    (plain, adaptive) = Summary(entries).rows
    assert plain.ratio is None
    assert adaptive.ratio == pytest.approx(1.01)
    assert (adaptive.accept_length, adaptive.proposed_per_pass) == (2.0, 3.0)
    assert adaptive.others_share == pytest.approx(0.03)


def test_the_worst_ratio_is_over_all_cases_and_levels() -> None:
    entries = rounds("random-text", 1, {BASELINE: [100], ADAPTIVE: [98]})
    entries += rounds("random-text", 8, {BASELINE: [100], ADAPTIVE: [150]})
    entries += rounds("long-context", 8, {BASELINE: [100], ADAPTIVE: [99]})
    assert Summary(entries).record()["worst_ratio"] == 0.98


def test_the_adaptive_width_is_compared_with_the_fastest_fixed_one_of_each_level() -> None:
    widths = {"width-2": [100.0, 100.0], "width-8": [200.0, 210.0]}
    entries = rounds("spec-bench", 1, {ADAPTIVE: [210.0, 210.0], **widths})
    assert Summary(entries).adaptive_over_best_fixed_min == pytest.approx(1.025)
    entries += rounds("spec-bench", 8, {ADAPTIVE: [99.0], "width-2": [100.0], "width-8": [80.0]})
    assert Summary(entries).adaptive_over_best_fixed_min == pytest.approx(0.99)


def test_what_was_not_served_has_no_figure() -> None:
    summary = Summary(rounds("random-text", 1, {ADAPTIVE: [100.0]}))
    assert summary.rows[0].ratio is None
    assert summary.worst_ratio is None
    assert summary.adaptive_over_best_fixed_min is None
    assert Summary([]).record()["rows"] == []
    assert "random-text" in summary.table()
    assert "| random-text | 1 | adaptive |" in summary.markdown()
