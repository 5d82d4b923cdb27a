"""How fast something grows, with a bound on what that figure is worth.

Neighbouring samples of a process's memory are alike, so as many samples as there are seconds would
make least squares look far more certain than they are. So samples are first averaged over BLOCKS
stretches of equal time; the line goes through these means, and the interval is Student's, from how
far they lie off the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS = 12
STUDENT_975 = 2.228
"""97.5 % point of Student's t with BLOCKS - 2 degrees of freedom: 95 % lie within."""
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
        return {
            "per_hour": round(self.per_hour, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
        }

    def __str__(self) -> str:
        return f"{self.per_hour:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def slope(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """Of (seconds, value) by least squares over block means; None if there are too few samples."""
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
    away = times - times.mean()
    square = float((away**2).sum())
    per_s = float((away * values).sum()) / square
    residuals = values - values.mean() - per_s * away
    error = float(np.sqrt((residuals**2).sum() / (BLOCKS - 2) / square))
    return Slope(
        per_s * HOUR_S,
        (per_s - STUDENT_975 * error) * HOUR_S,
        (per_s + STUDENT_975 * error) * HOUR_S,
    )
