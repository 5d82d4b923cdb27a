"""Estimates the growth of a figure per hour, with a 95 % interval.

Neighbouring samples of a process's memory correlate, so the interval of a fit to all samples would
be far too small. So the module fits the means of BLOCKS stretches of equal time. The interval is
Student's, from the residuals of the means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmark.harness.statistics import rounded

BLOCKS = 12
STUDENT_975 = float(stats.t.ppf(0.975, BLOCKS - 2))
"""The 97.5th percentile of Student's t with BLOCKS - 2 degrees of freedom."""
HOUR_S = 3600.0
MIN_PER_BLOCK = 3
"""Minimum number of samples in a block."""


class Slope(NamedTuple):
    """Growth per hour, and the ends of its 95 % interval."""

    per_hour: float
    low: float
    high: float

    def record(self) -> dict[str, float]:
        found: dict[str, float] = rounded(self._asdict())
        return found


def slope(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """Slope of (seconds, value), by least squares over block means; None for too few samples."""
    if len(samples) < BLOCKS * MIN_PER_BLOCK:
        return None
    points = np.array(sorted(samples), dtype=np.float64)
    if points[0, 0] == points[-1, 0]:
        return None
    counts, times, values = (
        stats.binned_statistic(points[:, 0], points[:, column], statistic, BLOCKS).statistic
        for column, statistic in ((0, "count"), (0, "mean"), (1, "mean"))
    )
    if counts.min() < MIN_PER_BLOCK:
        return None
    line = stats.linregress(times, values)
    # The error is NaN if all means are equal.
    half = STUDENT_975 * np.nan_to_num(line.stderr)
    ends = (line.slope, line.slope - half, line.slope + half)
    return Slope(*(float(end) * HOUR_S for end in ends))
