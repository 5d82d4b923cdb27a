"""Learns how fast the time of a pass grows with its rows on this machine.

The growth that `PassCost` predicts is measured on one kind of processor. Others differ: with AMX
the matrix products of 64 rows take 1.4 times as long as those of one row, with AVX2 several times.
Passes of an unmeasured size are predicted by the growth between those that were measured, so that a
server whose rows are cheap tries wider passes.
"""

from __future__ import annotations

MEMORY = 0.005
"""Weight of the latest pass."""
PRIOR = 0.5
"""Weight of the predicted growth, in passes: one of extra 0 and one of extra 1 of this weight."""
LEAST, MOST = 0.1, 4.0
"""Limits of the factor."""


class RowCost:
    """Fits seconds = unit * (1 + factor * extra) to measured passes.

    `extra` is the predicted time of a pass without the part that does not depend on its rows, in
    units of that part.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        """Measured growth of the time with the rows over the predicted growth."""
        self._weight = self._extra = self._seconds = self._square = self._product = 0.0
        """Sums over the passes; older passes weigh less."""

    def observe(self, extra: float, seconds: float) -> None:
        """Record a pass with the predicted `extra` time."""
        keep = 1.0 - MEMORY
        self._weight = keep * self._weight + 1.0
        self._extra = keep * self._extra + extra
        self._seconds = keep * self._seconds + seconds
        self._square = keep * self._square + extra * extra
        self._product = keep * self._product + extra * seconds
        self.factor = self._fitted()

    def _fitted(self) -> float:
        """The factor of the least squares, with the predicted growth among the passes."""
        unit = self._seconds / (self._weight + self._extra)
        weight = self._weight + 2 * PRIOR
        extra, seconds = self._extra + PRIOR, self._seconds + 3 * PRIOR * unit
        square, product = self._square + PRIOR, self._product + 2 * PRIOR * unit
        slope = (weight * product - extra * seconds) / (weight * square - extra * extra)
        level = (seconds - slope * extra) / weight
        return MOST if level <= 0.0 else min(max(slope / level, LEAST), MOST)
