"""Measures listened time: the time in which a peer's messages would have been read.

A scheduler that was busy for ten seconds has read nothing in this time, so the silence does not
mean that the peer is gone. Time spent waiting at the socket therefore counts in full, and time
between two polls counts up to a limit. Time in which the peer gets no CPU does not count.
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

    def look(self, waited_s: float = 0.0, *, counts: bool = True) -> float:
        """Record a poll that waited `waited_s` seconds; return the listened time so far.

        The time since the last poll is left out unless it `counts`.
        """
        now = self._clock()
        if counts:
            between = max(0.0, now - self._looked_at - waited_s)
            self.seconds += waited_s + min(between, self._longest_gap_s)
        self._looked_at = now
        return self.seconds
