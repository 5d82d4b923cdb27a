"""The measured times of passes follow recent passes, and lengths recent completions."""

import pytest

from sglang_qspec.sidecar.pass_statistics import PassStatistics


def test_totals_add_up() -> None:
    statistics = PassStatistics()
    statistics.observe_step(4, tokens=3, read=4, seconds=0.5)
    statistics.observe_step(1, tokens=1, read=1, seconds=0.25)
    assert (statistics.step_passes, statistics.step_tokens) == (2, 4)
    assert statistics.step_seconds == 0.75


def test_the_seconds_of_all_passes_add_up() -> None:
    statistics = PassStatistics()
    statistics.observe_pass(8, 0.5)
    statistics.observe_pass(0, 0.25)  # a part of a long prefill
    assert statistics.pass_seconds == 0.75


def test_each_order_of_magnitude_of_sizes_has_its_own_average() -> None:
    statistics = PassStatistics()
    for _ in range(100):
        statistics.observe_step(8, tokens=8, read=8, seconds=0.02)
        statistics.observe_step(1, tokens=1, read=1, seconds=0.01)
        statistics.observe_step(12, tokens=12, read=12, seconds=0.03)
    (small, small_seconds), (large, large_seconds) = statistics.step_times
    assert small == 1.0
    assert small_seconds == pytest.approx(0.01)
    assert 8 < large < 12
    assert 0.02 < large_seconds < 0.03


def test_steps_before_the_first_request_are_the_first_averages() -> None:
    statistics = PassStatistics()
    statistics.expect_steps([(1, 0.01), (2, 0.02)])
    assert statistics.step_times == [(1.0, 0.01), (2.0, 0.02)]
    statistics.observe_step(2, tokens=2, read=2, seconds=0.03)
    statistics.expect_steps([(2, 9.0)])
    assert statistics.step_times == [(1.0, 0.01), (2.0, pytest.approx(0.021))]
    assert statistics.step_passes == 1


def test_an_interrupted_pass_hardly_changes_the_average() -> None:
    statistics = PassStatistics()
    statistics.observe_step(1, tokens=1, read=1, seconds=0.01)
    statistics.observe_step(1, tokens=1, read=1, seconds=9.0)
    assert statistics.step_times[0][1] < 0.012


def test_a_pass_that_reads_a_prompt_is_no_step() -> None:
    statistics = PassStatistics()
    statistics.observe_step(1, tokens=1, read=200, seconds=0.5)
    assert statistics.step_times == []
    assert statistics.step_seconds == 0.5


def test_the_time_of_reading_follows_the_passes_that_read() -> None:
    statistics = PassStatistics()
    statistics.observe_reading(4, read=16, seconds=9.0)  # a step
    assert statistics.read_seconds == 0.0
    statistics.expect_reading(0.001)
    assert statistics.read_seconds == 0.001
    statistics.observe_reading(1, read=256, seconds=9.0)  # an interrupted pass
    assert 0.001 < statistics.read_seconds < 0.0011
    for _ in range(64):
        statistics.observe_reading(2, read=256, seconds=0.512)
    assert statistics.read_seconds == pytest.approx(0.002, rel=0.01)
    statistics.expect_reading(0.5)
    assert statistics.read_seconds == pytest.approx(0.002, rel=0.01)


def test_there_is_no_speed_before_the_first_token() -> None:
    statistics = PassStatistics()
    assert statistics.tokens_per_s is None
    statistics.observe_pass(0, 1.0)  # a part of a long prefill
    assert statistics.tokens_per_s is None


def test_the_speed_includes_prefills_and_follows_recent_passes() -> None:
    statistics = PassStatistics()
    for _ in range(100):
        statistics.observe_pass(0, 0.1)
        statistics.observe_pass(20, 0.1)
    assert statistics.tokens_per_s == pytest.approx(100, rel=0.05)
    for _ in range(300):
        statistics.observe_pass(1, 0.1)
    assert statistics.tokens_per_s == pytest.approx(10, rel=0.05)


def test_the_length_is_a_mean_over_recent_completions() -> None:
    statistics = PassStatistics()
    statistics.observe_length(40)
    assert statistics.completion_len == 40
    for _ in range(200):
        statistics.observe_length(80)
    assert statistics.completion_len == pytest.approx(80, rel=0.01)


def test_the_time_of_a_step_is_that_of_one_token_for_each_completion() -> None:
    statistics = PassStatistics()
    statistics.observe_step(2, 3, 3, 0.6, drafted=3)
    assert statistics.step_times[0] == pytest.approx((2.0, 0.4))
