"""How fast the machine is now.

Other processes, the clock of the processor and neighbours on a host change the speed of a machine
within seconds. Rates that were measured at different moments can be compared once this is divided
out.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

PACE = 0.02
"""Standard deviation by which the pace changes from one pass to the next, as a share."""
OWN = 0.002
"""Standard deviation by which the usual time of a size changes from one pass to the next."""
CHANGE = 0.03
"""Standard deviation by which the usual times of a use differ when it is used again."""
NOISE = 0.1
"""Standard deviation of the time of a single pass."""
FIRST = 1.0
"""Standard deviation of the first pass of a size, which allocates memory."""
MOST = 0.5
"""Largest logarithm by which a pass counts as slower or faster than expected."""
SIZES = 48
"""Number of sizes that are known; then the one that was seen longest ago is forgotten."""


class Pace:
    """Estimates the pace and the usual time of each size of passes, both together.

    The time of a pass is the product of the two and of noise. All three vary; how much each does is
    assumed, and a Kalman filter over the logarithms divides what a pass takes more or less than
    expected between pace and size. A size that was just measured tells the pace. One that is new,
    or whose use has just begun again, tells mostly its own time.
    """

    def __init__(self) -> None:
        self._use: Hashable = None
        """Use of the latest pass."""
        self._rows: dict[tuple[Hashable, Hashable], int] = {}
        """Index of each use and size in the estimates, the one seen longest ago first."""
        self._mean: NDArray[np.float64] = np.zeros(1 + SIZES)
        """Logarithms of the pace, and of the seconds of each size at the usual pace."""
        self._covariance: NDArray[np.float64] = np.zeros((1 + SIZES, 1 + SIZES))
        """Their covariances."""

    @property
    def now(self) -> float:
        """Present time of passes over their usual time."""
        return math.exp(self._mean[0])

    def observe(self, use: Hashable, size: Hashable, seconds: float) -> None:
        """Record a pass.

        All passes of one `use` and `size` take equally long on a machine at one pace.
        """
        mean, covariance = self._mean, self._covariance
        covariance[0, 0] += PACE**2
        measured = math.log(seconds)
        begins, self._use = use != self._use, use
        row = self._rows.pop((use, size), None)
        if row is None:
            self._rows[use, size] = self._begin(measured)
            return
        self._rows[use, size] = row
        if begins:
            for (other, _), its in self._rows.items():
                if other == use:
                    covariance[its, its] += CHANGE**2
        covariance[row, row] += OWN**2
        shared = covariance[0] + covariance[row]
        error = measured - mean[0] - mean[row]
        if covariance[row, row] < FIRST**2:
            error = min(max(error, -MOST), MOST)
        gain = shared / (shared[0] + shared[row] + NOISE**2)
        mean += gain * error
        covariance -= np.outer(gain, shared)

    def _begin(self, measured: float) -> int:
        """Begin the estimate of a size by its first pass, with this logarithm; return its row."""
        if len(self._rows) < SIZES:
            row = 1 + len(self._rows)
        else:
            row = self._rows.pop(next(iter(self._rows)))
        mean, covariance = self._mean, self._covariance
        mean[row] = measured - mean[0]
        covariance[row], covariance[:, row] = -covariance[0], -covariance[0]
        covariance[row, row] = covariance[0, 0] + FIRST**2
        return row
