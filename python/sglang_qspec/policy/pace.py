"""How fast the machine is now.

Other processes, the clock of the processor and neighbours on a host change the speed of a machine
within seconds. Rates that were measured at different moments can be compared once this is divided
out.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

COMMON = 0.1
"""Weight of the latest pass in the pace; after a change of use, in the usual time of its size."""
OWN = 0.02
"""Weight of the latest pass in the usual time of its size; higher for the first passes."""
SETTLED = 20
"""Passes of a size, and passes since a change of use, from which further ones tell the pace."""
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
    """Compares passes of all sizes with earlier passes of the same use and size.

    The machine hardly changes from one pass to the next. So what the first passes after a change of
    use take more or less than usual is the cost of this use, and what later ones do is the machine.
    """

    def __init__(self) -> None:
        self._use: Hashable = None
        """Use of the latest pass."""
        self._since = 0
        """Number of passes since the use changed."""
        self._sizes: dict[Hashable, _Size] = {}
        self.now = 1.0
        """Present time of passes over their usual time."""

    def observe(self, use: Hashable, size: Hashable, seconds: float) -> None:
        """Record a pass.

        All passes of one `use` and `size` take equally long on a machine at one pace.
        """
        self._since = self._since + 1 if use == self._use else 1
        self._use = use
        found = self._sizes.setdefault((use, size), _Size(seconds / self.now))
        found.seen += 1
        own = OWN
        error = seconds / (found.usual_s * self.now) - 1.0
        if found.seen > SETTLED:
            error = min(max(error, -MOST), MOST)
            if self._since > SETTLED:
                self.now *= 1.0 + COMMON * error
            else:
                own = COMMON
        if found.seen > 1:  # the first pass of a size allocates memory, so the second replaces it
            found.usual_s *= 1.0 + max(own, 1 / (found.seen - 1)) * error
