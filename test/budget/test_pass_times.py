"""What passes take by their rows."""

import pytest

from sglang_qspec.budget import PassCost, PassTimes
from sglang_qspec.errors import ConfigError


def test_passes_that_were_seen_give_the_level_and_the_cost_its_shape() -> None:
    times = PassTimes(PassCost(cheap_rows=0, row=1.0))
    times.observe(1, 0.2)
    assert times.seconds(1) == pytest.approx(0.2)
    assert times.seconds(3) == pytest.approx(0.4)


def test_each_order_of_magnitude_has_its_own_level() -> None:
    times = PassTimes(PassCost(cheap_rows=0, row=0.0))
    for _ in range(300):
        times.observe(1, 0.1)
        times.observe(16, 0.3)
    assert times.seconds(1) == pytest.approx(0.1, rel=0.15)
    assert times.seconds(31) == pytest.approx(0.3, rel=0.15)
    assert times.seconds(1000) == times.seconds(16)  # the nearest that was seen


def test_a_pass_behind_an_interruption_is_hardly_news() -> None:
    times = PassTimes()
    for _ in range(50):
        times.observe(1, 0.1)
    times.observe(1, 30.0)
    assert times.seconds(1) < 0.11


def test_a_size_that_is_no_longer_used_is_not_condemned_by_its_last_passes() -> None:
    times = PassTimes(PassCost(cheap_rows=0, row=0.0))
    times.observe(1, 0.1)
    for _ in range(100):
        times.observe(16, 0.2)
    before = times.seconds(16)
    for _ in range(2000):
        times.observe(1, 0.1)
    assert times.seconds(16) < 0.6 * before


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"row is -0\.1, but must be at least 0"):
        PassCost(row=-0.1)
