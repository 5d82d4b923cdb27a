"""The measured times of draft steps."""

import pytest

from sglang_qspec.sidecar.step_times import StepTimes


def test_totals_add_up() -> None:
    times = StepTimes()
    times.observe(4, tokens=3, read=4, seconds=0.5)
    times.observe(1, tokens=1, read=1, seconds=0.25)
    assert (times.passes, times.tokens, times.seconds) == (2, 4, 0.75)


def test_each_order_of_magnitude_of_sizes_has_its_own_average() -> None:
    times = StepTimes()
    for _ in range(100):
        times.observe(8, tokens=8, read=8, seconds=0.02)
        times.observe(1, tokens=1, read=1, seconds=0.01)
        times.observe(12, tokens=12, read=12, seconds=0.03)
    (small, small_seconds), (large, large_seconds) = times.by_size
    assert small == 1.0
    assert small_seconds == pytest.approx(0.01)
    assert 8 < large < 12
    assert 0.02 < large_seconds < 0.03


def test_an_interrupted_pass_hardly_changes_the_average() -> None:
    times = StepTimes()
    times.observe(1, tokens=1, read=1, seconds=0.01)
    times.observe(1, tokens=1, read=1, seconds=9.0)
    assert times.by_size[0][1] < 0.012


def test_a_pass_that_reads_a_prompt_is_no_step() -> None:
    times = StepTimes()
    times.observe(1, tokens=1, read=200, seconds=0.5)
    assert times.by_size == []
    assert times.seconds == 0.5
