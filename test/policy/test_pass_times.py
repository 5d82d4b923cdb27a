"""The estimated time of a pass by its number of requests and its width."""

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.policy import LADDER, PassCost, PassTimes
from sglang_qspec.policy.pass_times import FIRST_GAP, SETTLED

FLAT = PassCost(cheap_rows=0, row=0.0)


def test_observed_passes_set_the_level_and_the_cost_model_sets_the_shape() -> None:
    times = PassTimes(PassCost(cheap_rows=0, row=1.0))
    times.observe(1, 1, 0.2)
    assert times.seconds(1, 1) == pytest.approx(0.2)
    assert times.seconds(1, 3) == pytest.approx(0.4)
    assert times.seconds(3, 1) == pytest.approx(0.4)


def test_each_width_and_each_order_of_magnitude_of_requests_has_its_own_level() -> None:
    times = PassTimes(FLAT)
    sizes = {(1, 1): 0.1, (1, 4): 0.15, (8, 1): 0.3, (8, 4): 0.7}
    for _ in range(300):
        for (requests, width), seconds in sizes.items():
            times.observe(requests, width, seconds)
    for (requests, width), seconds in sizes.items():
        assert times.seconds(requests, width) == pytest.approx(seconds, rel=0.1)
    assert times.seconds(15, 4) == times.seconds(8, 4)
    assert times.seconds(1000, 6) == times.seconds(8, 4)  # the nearest observed size


def test_the_widths_of_the_ladder_have_levels_of_their_own() -> None:
    times = PassTimes()
    assert len({times._size(4, width) for width in LADDER}) == len(LADDER)


def test_a_ragged_pass_takes_the_level_of_its_average_width() -> None:
    times = PassTimes(FLAT)
    for _ in range(100):
        for width, seconds in ((1, 0.1), (1.1, 0.2), (4, 0.4)):
            times.observe(8, width, seconds)
    assert times.seconds(8, 4.3) == times.seconds(8, 3.7) == times.seconds(8, 4)
    # A pass with one draft token is no plain pass, which SGLang runs by other kernels.
    assert times.seconds(8, 1.125) == pytest.approx(0.2, rel=0.1)
    assert times.seconds(8, 1) == pytest.approx(0.1, rel=0.1)


def test_the_rows_of_a_ragged_pass_set_its_cost() -> None:
    times = PassTimes(PassCost(cheap_rows=0, row=1.0))
    times.observe(4, 1, 0.5)
    assert times.seconds(4, 1.5) == pytest.approx(0.7)
    assert not times.plain_is_due(4)
    for _ in range(4):
        times.observe(4, 1.25, 0.6)
    assert not times.plain_is_due(4)
    for _ in range(4):
        times.observe(4, 1.25, 0.6)
    assert times.plain_is_due(4)


def test_the_first_pass_of_a_further_size_is_ignored() -> None:
    times = PassTimes(FLAT)
    times.observe(1, 1, 0.1)
    times.observe(1, 4, 9.0)
    assert times.seconds(1, 4) == pytest.approx(0.1)


def test_a_slowdown_of_one_width_raises_the_estimate_of_the_others() -> None:
    times = PassTimes(FLAT)
    for _ in range(4 * SETTLED):
        times.observe(2, 1, 0.1)
        times.observe(2, 4, 0.15)
    for _ in range(4 * SETTLED):  # longer contexts, and only one width in use
        times.observe(2, 4, 0.30)
    assert times.seconds(2, 1) == pytest.approx(0.2, rel=0.15)  # the ratio stays
    assert times.seconds(2, 4) == pytest.approx(0.3, rel=0.05)


def test_a_new_size_does_not_change_the_estimate_of_other_sizes() -> None:
    times = PassTimes(FLAT)
    for _ in range(100):
        times.observe(2, 1, 0.1)
    for _ in range(SETTLED - 1):
        times.observe(2, 16, 0.4)
    assert times.seconds(2, 1) == pytest.approx(0.1, rel=0.05)
    assert times.seconds(2, 16) > 0.3


def test_an_interrupted_pass_hardly_changes_the_estimate() -> None:
    times = PassTimes()
    for _ in range(50):
        times.observe(1, 1, 0.1)
    times.observe(1, 1, 30.0)
    assert times.seconds(1, 1) < 0.11


def test_the_estimate_of_a_slow_width_falls_while_the_width_is_unused() -> None:
    times = PassTimes(FLAT)
    times.observe(1, 1, 0.1)
    for _ in range(100):
        times.observe(1, 16, 0.2)
    before = times.seconds(1, 16) / times.seconds(1, 1)
    for _ in range(2000):
        times.observe(1, 1, 0.1)
    assert times.seconds(1, 16) / times.seconds(1, 1) < 0.8 * before


def test_times_on_other_cores_are_told_once_some_passes_ran_there() -> None:
    times = PassTimes(FLAT)
    times.enter_cores(1)
    assert times.on(1) is times.on(2) is None
    for _ in range(50):
        times.observe(2, 1, 0.2)
    times.enter_cores(2)
    for _ in range(50):
        times.observe(2, 1, 0.1)
    one, two, three = (times.on(cores) for cores in (1, 2, 3))
    assert three is None
    assert one is not None
    assert two is not None
    assert one(2, 1) == pytest.approx(2 * two(2, 1), rel=0.01)
    assert two(2, 1) == times.seconds(2, 1) == pytest.approx(0.1)
    times.observe(2, 1, 0.1)
    assert one(2, 1) == pytest.approx(2 * two(2, 1), rel=0.01)


def test_times_near_a_batch_size_are_told_once_passes_of_about_that_size_ran() -> None:
    times = PassTimes(FLAT)
    times.enter_cores(1)
    for _ in range(50):
        times.observe(2, 1, 0.1)
    assert all(times.on(1, near) is not None for near in (1, 2, 3, 4, 7))
    assert all(times.on(1, near) is None for near in (8, 16, 64))
    times.observe(16, 1, 0.2)
    assert times.on(1, 16) is None, "one pass is too few"
    for _ in range(50):
        times.observe(16, 1, 0.2)
    near = times.on(1, 16)
    assert near is not None
    assert near(16, 1) == pytest.approx(0.2, rel=0.01)


def test_one_measured_size_of_a_long_context_predicts_the_others() -> None:
    times = PassTimes(FLAT)
    times.enter(100)
    for _ in range(50):
        times.observe(16, 1, 0.1)
        times.observe(16, 4, 0.15)
    times.enter(4000)
    for _ in range(5):
        times.observe(16, 1, 0.2)
    assert times.seconds(16, 4) == pytest.approx(0.3, rel=0.1)
    times.enter(100)
    assert times.seconds(16, 4) == pytest.approx(0.15, rel=0.05)


def test_long_contexts_have_levels_of_their_own_and_leave_those_of_short_ones() -> None:
    times = PassTimes()
    times.enter(100)
    for _ in range(50):
        times.observe(16, 1, 0.1)
        times.observe(16, 4, 0.15)
    times.enter(4000)
    assert times.seconds(16, 4) / times.seconds(16, 1) == pytest.approx(1.5, rel=0.05)
    for _ in range(20):
        times.observe(16, 1, 0.2)
        times.observe(16, 4, 0.6)
    assert times.seconds(16, 4) / times.seconds(16, 1) == pytest.approx(3.0, rel=0.1)
    times.enter(100)
    assert times.seconds(16, 4) / times.seconds(16, 1) == pytest.approx(1.5, rel=0.05)


def test_a_plain_pass_is_due_soon_after_contexts_have_grown() -> None:
    times = PassTimes()
    times.enter(100)
    for _ in range(6):
        times.observe(16, 1, 0.1)
    for context, due in ((100, False), (4000, True)):
        times.enter(context)
        for _ in range(FIRST_GAP):
            times.observe(16, 4, 0.15)
        assert times.plain_is_due(16) == due


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"row is -0\.1, but must be at least 0"):
        PassCost(row=-0.1)


@pytest.mark.parametrize("row", [0.003, 0.015, 0.12])
def test_narrow_passes_tell_what_wide_ones_cost_on_this_machine(row: float) -> None:
    times = PassTimes(PassCost())

    def seconds(requests: int, width: float) -> float:
        return 0.025 * (1.0 + row * requests * width)

    for number in range(300):
        width = (1, 2, 4, 8)[number % 4]
        times.observe(2, width, seconds(2, width))
    prior = PassTimes(PassCost())
    prior.observe(2, 8, seconds(2, 8))
    for width in (16, 32):
        learnt, without = times.seconds(2, width), prior.seconds(2, width)
        truth = seconds(2, width)
        assert abs(learnt - truth) < 0.5 * abs(without - truth)


def test_the_cost_of_rows_is_learnt_apart_on_each_number_of_cores() -> None:
    times = PassTimes(PassCost())
    for cores, row in ((1, 0.0), (2, 0.08)):
        times.enter_cores(cores)
        for number in range(200):
            width = 1 + number % 6
            times.observe(4, width, 0.02 * (1.0 + row * 4 * width))
    flat, steep = times.on(1), times.on(2)
    assert flat is not None
    assert steep is not None
    assert flat(4, 16) < 2 * flat(4, 1)
    assert steep(4, 16) > 4 * steep(4, 1)
