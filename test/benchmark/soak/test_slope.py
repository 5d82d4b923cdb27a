"""Growth per hour and its interval, on made-up samples."""

import math
import random

from benchmark.soak.slope import BLOCKS, MIN_PER_BLOCK, slope


def noisy(per_hour: float, seed: int, seconds: int = 3600) -> list[tuple[float, float]]:
    """One sample per second around 500, with correlated noise as in memory figures."""
    rng = random.Random(seed)
    away, found = 0.0, []
    for second in range(seconds):
        away = 0.9 * away + rng.gauss(0.0, 1.0)
        found.append((float(second), 500.0 + per_hour * second / 3600 + away))
    return found


def test_a_straight_line_has_its_slope_and_an_interval_of_width_0() -> None:
    samples = [(float(second), 100.0 + 0.01 * second) for second in range(600)]
    random.Random(1).shuffle(samples)
    found = slope(samples)
    assert found is not None
    assert math.isclose(found.per_hour, 36.0)
    assert math.isclose(found.low, 36.0)
    assert math.isclose(found.high, 36.0)


def test_the_interval_contains_the_true_slope_in_about_19_of_20_cases() -> None:
    """With correlated noise, an interval from single samples would be too narrow."""
    hits = 0
    for seed in range(200):
        found = slope(noisy(3.0, seed))
        assert found is not None
        hits += found.low <= 3.0 <= found.high
    assert 180 <= hits <= 199


def test_too_few_samples_have_no_slope() -> None:
    enough = [(float(second), 1.0) for second in range(BLOCKS * MIN_PER_BLOCK)]
    assert slope(enough) is not None
    assert slope(enough[:-1]) is None
    assert slope([]) is None
    assert slope([(1.0, 2.0)] * 100) is None


def test_a_gap_that_empties_a_block_gives_no_slope() -> None:
    """A suspended machine leaves a gap, and the other samples would get wrong weights."""
    samples = [(float(second), 1.0) for second in range(600) if not 200 < second < 320]
    assert slope(samples) is None
