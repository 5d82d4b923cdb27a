"""The drafter's speed follows its recent passes, and its lengths the recent completions."""

import pytest

from sglang_qspec.sidecar.pace import Pace


def test_there_is_no_speed_before_the_first_token() -> None:
    pace = Pace()
    assert pace.tokens_per_s is None
    pace.observe_pass(0, 1.0)  # a part of a long prefill
    assert pace.tokens_per_s is None


def test_the_speed_includes_prefills_and_follows_recent_passes() -> None:
    pace = Pace()
    for _ in range(100):
        pace.observe_pass(0, 0.1)
        pace.observe_pass(20, 0.1)
    assert pace.tokens_per_s == pytest.approx(100, rel=0.05)
    for _ in range(300):
        pace.observe_pass(1, 0.1)
    assert pace.tokens_per_s == pytest.approx(10, rel=0.05)


def test_the_length_is_a_mean_over_recent_completions() -> None:
    pace = Pace()
    pace.observe_length(40)
    assert pace.length == 40
    for _ in range(200):
        pace.observe_length(80)
    assert pace.length == pytest.approx(80, rel=0.01)
