"""Times of passes between and beyond the sizes that were measured."""

from __future__ import annotations

import pytest

from sglang_qspec.sidecar.pass_times import PassTimes


def test_times_lie_between_the_means_and_rise_beyond_them() -> None:
    times = PassTimes()
    assert times.at(3) == 0.0
    times.expect([(2, 1.0)])
    assert [times.at(size) for size in (1, 2, 9)] == [1.0, 1.0, 1.0]
    times.expect([(8, 4.0), (16, 6.0)])
    found = [times.at(size) for size in (1, 2, 5, 8, 12, 16, 32)]
    assert found == pytest.approx([1.0, 1.0, 2.5, 4.0, 5.0, 6.0, 10.0])


def test_larger_passes_are_never_expected_to_be_faster_than_the_largest() -> None:
    times = PassTimes()
    times.expect([(4, 2.0), (8, 1.0)])
    assert times.at(64) == 1.0


def test_means_follow_the_passes_and_a_peak_counts_little() -> None:
    times = PassTimes()
    times.expect([(4, 1.0)])
    times.expect([(4, 5.0)])
    assert times.means == [(4.0, 1.0)]
    times.observe(6, 100.0)
    assert times.means[0] == pytest.approx((4.2, 1.1))
