"""The growth of a figure per hour, with a 95 % interval.

Neighbouring samples of a process's memory are alike, so least squares over all of them would give
an interval that is far too small. Samples are therefore averaged over BLOCKS stretches of equal
time. The line goes through these means, and the interval is Student's, from their residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

from benchmark.harness.statistics import rounded

BLOCKS = 12
STUDENT_975 = float(stats.t.ppf(0.975, BLOCKS - 2))
"""95 % of Student's t with BLOCKS - 2 degrees of freedom lie within plus and minus this."""
HOUR_S = 3600.0
MIN_PER_BLOCK = 3
"""Samples, so that a block's mean is one."""


@dataclass(frozen=True)
class Slope:
    """Growth per hour, and the ends of its 95 % interval."""

    per_hour: float
    low: float
    high: float

    def record(self) -> dict[str, float]:
        found: dict[str, float] = rounded(asdict(self))
        return found

    def __str__(self) -> str:
        return f"{self.per_hour:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def slope(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """Slope of (seconds, value), by least squares over block means; None for too few samples."""
    if len(samples) < BLOCKS * MIN_PER_BLOCK:
        return None
    points = np.array(sorted(samples), dtype=np.float64)
    begin, end = points[0, 0], points[-1, 0]
    if end <= begin:
        return None
    places = np.minimum(((points[:, 0] - begin) / (end - begin) * BLOCKS).astype(int), BLOCKS - 1)
    counts = np.bincount(places, minlength=BLOCKS)
    if counts.min() < MIN_PER_BLOCK:
        return None
    times = np.bincount(places, points[:, 0], BLOCKS) / counts
    values = np.bincount(places, points[:, 1], BLOCKS) / counts
    line = stats.linregress(times, values)
    # The error of means that are all equal is not a number.
    half = STUDENT_975 * np.nan_to_num(line.stderr)
    ends = (line.slope, line.slope - half, line.slope + half)
    return Slope(*(float(end) * HOUR_S for end in ends))
