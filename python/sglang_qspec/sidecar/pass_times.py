"""How long passes take by their size, as moving averages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MEMORY = 0.1
"""Weight of the latest pass in the averages of its size."""


class PassTimes:
    """Mean size and mean seconds of passes, by the binary order of magnitude of the size."""

    def __init__(self) -> None:
        self._by_magnitude: dict[int, tuple[float, float]] = {}

    @property
    def means(self) -> list[tuple[float, float]]:
        """Mean (size, seconds) of each order of magnitude, the smallest first."""
        return [self._by_magnitude[key] for key in sorted(self._by_magnitude)]

    def expect(self, times: Iterable[tuple[int, float]]) -> None:
        """Take (size, seconds) of passes before the first request as the first averages."""
        for size, seconds in times:
            self._by_magnitude.setdefault(size.bit_length(), (float(size), seconds))

    def observe(self, size: int, seconds: float) -> None:
        """Record a pass."""
        key = size.bit_length()
        mean_size, mean_seconds = self._by_magnitude.get(key, (float(size), seconds))
        # A cap limits the effect of a short load peak.
        seconds = min(seconds, 2 * mean_seconds)
        self._by_magnitude[key] = (
            mean_size + MEMORY * (size - mean_size),
            mean_seconds + MEMORY * (seconds - mean_seconds),
        )

    def at(self, size: float) -> float:
        """Seconds of a pass of this size, between the means of the next sizes; 0 if none is known.

        Beyond the largest mean the seconds rise as they do between the last two, and a pass smaller
        than all known ones takes as long as the smallest.
        """
        if not self._by_magnitude:
            return 0.0
        sizes, seconds = zip(*self.means, strict=True)
        found = float(np.interp(size, sizes, seconds))
        if size > sizes[-1] and len(sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            found += max(0.0, slope) * (size - sizes[-1])
        return found
