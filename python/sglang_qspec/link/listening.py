"""Measures listened time: the time in which a peer's messages would have been read.

A scheduler that was busy for ten seconds has read nothing in this time, so the silence does not
mean that the peer is gone. Time spent waiting at the socket therefore counts in full, and time
between two polls counts up to a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Listening:
    """A clock, in seconds from 0, that runs only while its owner listens."""

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._looked_at = clock()

    def look(self, waited_s: float = 0.0) -> float:
        """Record a poll that waited `waited_s` seconds; return the listened time so far."""
        now = self._clock()
        between = max(0.0, now - self._looked_at - waited_s)
        self.seconds += waited_s + min(between, self._longest_gap_s)
        self._looked_at = now
        return self.seconds
