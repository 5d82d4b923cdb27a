"""The order of batches: deadlines are met where they can be, and tenants share fairly."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmark.batches.deadlines import HOUR, SPEED, batches, by_deadline, first_come, missed
from sglang_qspec.policy.deadlines import (
    FEWEST_S,
    LINE_TOKENS,
    PRESSED,
    PRIOR_LINES,
    Due,
    Lengths,
    Shares,
    Speed,
    choose,
    load,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("error", [1.0, 0.8, 1.25])
def test_no_deadline_is_missed_at_a_load_at_which_first_come_misses_many(
    seed: int, error: float
) -> None:
    """Also where the speed is measured with an `error`."""
    assert missed(batches(seed), first_come) >= 0.1
    assert missed(batches(seed), by_deadline(error)) == 0.0


def test_tenants_share_the_servers_while_no_deadline_is_near() -> None:
    shares = Shares()
    found = Counter[int]()
    due = [Due("a", 50 * HOUR, 1e6), Due("a", 60 * HOUR, 1e6), Due("b", 90 * HOUR, 1e6)]
    for _ in range(1000):
        index = choose(due, shares.tokens, SPEED, 0.0)
        shares.observe(due[index].tenant, 100)
        found[index] += 1
    assert found == {0: 500, 2: 500}  # each tenant its earliest batch
    shares.fade(1e6)
    assert max(shares.tokens.values()) < 1.0


def test_deadlines_alone_decide_once_one_is_near() -> None:
    served = {"a": 1e9, "b": 0.0}
    tokens = PRESSED * SPEED * HOUR
    due = [Due("b", 9 * HOUR, 1e6), Due("a", HOUR, 0.9 * tokens)]
    assert choose(due, served, SPEED, 0.0) == 0
    assert choose([due[0], Due("a", HOUR, 1.1 * tokens)], served, SPEED, 0.0) == 1
    assert choose(due, served, SPEED, 0.3 * HOUR) == 1  # less time is left
    assert choose(due, served, 0.0, 0.0) == 0  # the speed is not known


def test_the_load_is_that_of_the_worst_deadline() -> None:
    due = [Due("a", 10.0, 5 * SPEED), Due("a", 20.0, 20 * SPEED), Due("a", 1000.0, SPEED)]
    assert load(due, SPEED, 0.0) == pytest.approx(25 / 20)
    assert load(due, SPEED, 10.0) == float("inf")
    assert load([], SPEED, 0.0) == load(due, 0.0, 0.0) == 0.0


def test_speed_and_lengths_follow_what_is_measured() -> None:
    speed, predicted = Speed(), Speed(expected=70.0)
    for _ in range(int(FEWEST_S) - 1):
        speed.observe(50, 1.0)
        predicted.observe(50, 1.0)
    assert speed.rate == 0.0
    assert predicted.rate == 70.0
    for _ in range(1000):
        speed.observe(80, 1.0)
    assert speed.rate == pytest.approx(80, rel=0.01)
    lengths = Lengths()
    assert lengths.mean() == LINE_TOKENS
    for _ in range(PRIOR_LINES):
        lengths.observe(10)
    assert lengths.mean() == pytest.approx((LINE_TOKENS + 10) / 2)
