"""How long a peer has had the chance to be heard.

A scheduler that was busy for ten seconds has not listened for ten seconds, and must not take the
silence for the peer's death. So silence is measured in listened time: the time spent waiting at
the socket counts in full, the time between two looks at it counts up to a cap.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Listening:
    """A clock that runs only while its owner listens. Seconds, from 0."""

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._looked_at = clock()

    def look(self, waited_s: float = 0.0) -> float:
        """The owner looks at the socket, after waiting there for `waited_s`. The time so far."""
        now = self._clock()
        between = max(0.0, now - self._looked_at - waited_s)
        self.seconds += waited_s + min(between, self._longest_gap_s)
        self._looked_at = now
        return self.seconds
