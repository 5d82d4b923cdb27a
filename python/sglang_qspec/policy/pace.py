"""How fast the machine is now.

Other processes, the clock of the processor and neighbours on a host change the speed of a machine
within seconds. Rates that were measured at different moments can be compared once this is divided
out.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

COMMON = 0.1
"""Weight of the latest pass in the pace."""
OWN = 0.02
"""Weight of the latest pass in the usual time of its size; higher for the first passes."""
SETTLED = 20
"""Passes of a size from which further ones tell the pace."""
MOST = 0.5
"""Largest share by which a pass counts as slower or faster than expected."""


@dataclass
class _Size:
    """Passes that usually take equally long."""

    usual_s: float
    """Seconds of a pass at the usual pace."""
    seen: int = 0
    """Number of passes."""


class Pace:
    """Compares passes of all sizes with earlier passes of the same size."""

    def __init__(self) -> None:
        self._sizes: dict[Hashable, _Size] = {}
        self.now = 1.0
        """Present time of passes over their usual time."""

    def observe(self, size: Hashable, seconds: float) -> None:
        """Record a pass; all passes of one `size` take equally long on a machine at one pace."""
        found = self._sizes.setdefault(size, _Size(seconds / self.now))
        found.seen += 1
        error = seconds / (found.usual_s * self.now) - 1.0
        if found.seen > SETTLED:
            error = min(max(error, -MOST), MOST)
            self.now *= 1.0 + COMMON * error
        if found.seen > 1:  # the first pass of a size allocates memory, so the second replaces it
            found.usual_s *= 1.0 + max(OWN, 1 / (found.seen - 1)) * error
