"""The pace follows the machine, and not the sizes of the passes."""

from __future__ import annotations

import pytest

from sglang_qspec.policy.pace import SIZES, Pace

SECONDS = {"wide": 0.3, "plain": 0.1}


def serve(pace: Pace, size: str, passes: int, slower: float = 1.0) -> None:
    for _ in range(passes):
        pace.observe(size, 1, slower * SECONDS[size])


def test_the_pace_follows_a_machine_that_slows_down_and_recovers() -> None:
    pace = Pace()
    serve(pace, "wide", 200)
    assert pace.now == pytest.approx(1.0)
    serve(pace, "wide", 100, slower=2.0)
    assert pace.now == pytest.approx(2.0, rel=0.2)
    serve(pace, "wide", 100)
    assert pace.now == pytest.approx(1.0, rel=0.05)


def test_a_size_keeps_its_usual_time_while_others_are_used() -> None:
    """Else plain decoding, which is seldom tried, would count as slow as the passes in between."""
    pace = Pace()
    serve(pace, "plain", 100)
    serve(pace, "wide", 5000)
    serve(pace, "plain", 100)
    assert pace.now == pytest.approx(1.0)


def test_a_new_size_of_a_use_does_not_tell_the_pace() -> None:
    pace = Pace()
    for size, passes, seconds in ((1, 100, 0.1), (2, 1, 1.0), (2, 19, 0.2)):
        for _ in range(passes):  # the first one of size 2 allocates memory
            pace.observe("plain", size, seconds)
    assert pace.now == pytest.approx(1.0, abs=0.01)
    for _ in range(100):
        pace.observe("plain", 2, 0.2)
    assert pace.now == pytest.approx(1.0, abs=0.1)


def test_one_long_pass_says_little() -> None:
    pace = Pace()
    serve(pace, "plain", 100)
    serve(pace, "plain", 1, slower=50.0)
    assert 1.0 < pace.now < 1.1


def test_what_changes_with_the_use_is_not_the_machine() -> None:
    """Wide passes have become slower themselves; only what the uses differ by can matter."""
    pace = Pace()
    serve(pace, "plain", 100)
    serve(pace, "wide", 100)
    for _ in range(6):
        serve(pace, "plain", 100)
        plain = pace.now
        serve(pace, "wide", 50, slower=1.8)
    assert pace.now == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("passes", [5, 10, 30])
def test_the_pace_follows_a_steady_change_through_changes_of_use(passes: int) -> None:
    """Else what is tried while a machine slows down would seem to be slow."""
    pace = Pace()
    serve(pace, "plain", 100)
    serve(pace, "wide", 100)
    slower = 1.0
    for stay in range(200 // passes):
        for _ in range(passes):
            slower *= 1.005
            serve(pace, ("wide", "plain")[stay % 2], 1, slower)
            assert pace.now == pytest.approx(slower, rel=0.15)


def test_sizes_beyond_the_capacity_replace_those_seen_longest_ago() -> None:
    pace = Pace()
    for size in range(3 * SIZES):
        for _ in range(3):
            pace.observe("plain", "kept", 0.1)
        pace.observe("plain", size, 0.1 * (1 + size))
    assert pace.now == pytest.approx(1.0, abs=0.05)
    for _ in range(50):
        pace.observe("plain", "kept", 0.2)
    assert pace.now == pytest.approx(2.0, rel=0.1)
