"""The gain of overlapping drafting and verifying."""

from __future__ import annotations

import math

import pytest

from test.tools.theory.bounds import bound, halves_over_sequential, sd_over_psd


def test_hiding_a_time_behind_an_equal_one_doubles_the_throughput() -> None:
    assert bound(0.04, 0.04) == 2.0
    assert bound(0.04, 0.01) == bound(0.01, 0.04) == 1.25
    assert bound(0.04, 0.0) == 1.0
    assert bound(0.0, 0.0) == 1.0


def test_halves_reach_the_bound_over_half_the_requests_and_less_over_all_requests() -> None:
    flat = halves_over_sequential(8, lambda _: 0.04, lambda _: 0.03)
    assert flat.doubled == pytest.approx(bound(0.04, 0.03))
    assert flat.same == pytest.approx(flat.doubled / 2)
    linear = halves_over_sequential(8, lambda b: 0.04 * b, lambda b: 0.03 * b)
    assert linear.same == pytest.approx(linear.doubled) == pytest.approx(bound(0.04, 0.03))


def searched(v: float) -> float:
    """The ratio of Theorem 1 from its definition, by a search over draft times (alpha is 1)."""
    times = [30 * i / 200_000 for i in range(1, 200_001)]
    success = [-math.expm1(-t) for t in times]
    in_turn = min((v + t) / f for t, f in zip(times, success, strict=True))
    overlapped = min(max(v, t) / f for t, f in zip(times, success, strict=True))
    return in_turn / overlapped


@pytest.mark.parametrize("v", [0.05, 0.5, 1.2564, 1.68, 4.0, 12.0])
def test_the_ratio_of_theorem_1_uses_the_best_draft_times(v: float) -> None:
    assert sd_over_psd(v) == pytest.approx(searched(v), rel=1e-4)


def test_theorem_1_holds_at_its_threshold_and_up_to_5_2() -> None:
    assert min(sd_over_psd(1.68 + i / 100) for i in range(352)) >= 1.59
    assert max(sd_over_psd(i / 1000) for i in range(1, 10_000)) == pytest.approx(2.0, abs=1e-6)
    # If verification takes much longer than any useful draft, overlapping gains little.
    assert sd_over_psd(5.3) < 1.59
    assert sd_over_psd(1e4) == pytest.approx(1.0, abs=2e-3)


def test_the_constants_of_theorem_1_are_those_of_its_simple_lower_bound() -> None:
    def simple(v: float) -> float:
        return 1 + math.log1p(v) / v

    assert simple(1.68) == pytest.approx(1.59, abs=0.005)
    assert all(sd_over_psd(1.2565 + i / 10) >= simple(1.2565 + i / 10) for i in range(1000))
