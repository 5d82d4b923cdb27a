"""The growth of a pass's time with its rows, fitted to measured passes."""

import random

import pytest

from sglang_qspec.policy.row_cost import LEAST, MOST, RowCost


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0])
def test_the_factor_follows_noisy_passes(factor: float) -> None:
    rng = random.Random(1)
    cost = RowCost()
    for _ in range(400):
        extra = rng.uniform(0.0, 0.5)
        cost.observe(extra, 0.02 * (1.0 + factor * extra) * rng.uniform(0.8, 1.2))
    assert cost.factor == pytest.approx(factor, abs=0.25)


def test_passes_of_one_size_say_nothing_about_the_growth() -> None:
    cost = RowCost()
    for _ in range(1000):
        cost.observe(0.2, 0.03)
    assert cost.factor == pytest.approx(1.0, abs=0.05)


def test_the_factor_follows_a_machine_that_changes() -> None:
    cost = RowCost()
    for factor in (2.0, 0.5):
        for number in range(1000):
            extra = 0.1 * (number % 6)
            cost.observe(extra, 0.02 * (1.0 + factor * extra))
        assert cost.factor == pytest.approx(factor, rel=0.2)


def test_the_factor_has_limits() -> None:
    falling, steep = RowCost(), RowCost()
    for number in range(500):
        extra = 0.1 * (number % 6)
        falling.observe(extra, 0.02 * (1.0 - extra))
        steep.observe(extra, 0.001 + 0.5 * extra)
    assert falling.factor == LEAST
    assert steep.factor == MOST
