"""Percentiles, and ratios with their spread."""

from __future__ import annotations

import pytest

from benchmark.harness.run import Run
from benchmark.harness.statistics import Medians, Ratio, percentile, ratio_record, rounded
from test.benchmark.runs import answer, run


def speed(tokens_per_s: float) -> Run:
    return run(answer(10), seconds=10 / tokens_per_s)


def test_a_ratio_uses_the_rounds_that_both_sides_served_and_shows_its_spread() -> None:
    # In the second round the machine ran at half its speed.
    ours = {1: speed(101.0), 2: speed(49.0), 3: speed(120.0), 4: speed(1.0)}
    plain = {1: speed(100.0), 2: speed(50.0), 3: speed(100.0), 5: speed(1.0)}
    ratio = Ratio.of(ours, plain)
    assert ratio is not None
    assert ratio.values == pytest.approx((1.01, 0.98, 1.2))
    assert str(ratio) == "1.01 (0.98 to 1.20)"
    assert ratio_record("speedup", ratio) == {
        "speedup": 1.01,
        "speedup_spread": [0.98, 1.2],
        "speedup_rounds": 3,
    }


def test_a_ratio_of_one_round_says_that_it_has_no_spread() -> None:
    ratio = Ratio((0.85,))
    assert str(ratio) == "0.85 (one round)"
    assert ratio_record("worst", ratio)["worst_spread"] is None
    assert Ratio.of({1: speed(1.0)}, {2: speed(1.0)}) is None
    assert ratio_record("worst", None)["worst"] is None


def test_a_median_uses_the_runs_that_have_the_figure() -> None:
    found = Medians((run(answer(4), drafted=7), run(answer(6)), run(answer(8), drafted=9)))
    assert (found.tokens, found.drafted, found.match_rate) == (6, 8, None)
    # A percentile is a value that occurred.
    assert percentile([float(value) for value in range(200, 0, -1)], 0.99) == 198.0
    assert rounded({"a": [1.23456, 2], "b": None}) == {"a": [1.235, 2], "b": None}
