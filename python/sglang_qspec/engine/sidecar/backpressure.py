"""Backpressure: asks an overloaded sidecar for fewer submissions and completions.

The sidecar reports its `OverloadLevel` in each Heartbeat, and declines requests far back in the
queue for a time. `sidecar/overload.py` states the rule.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.sidecar.demand import Demand
from sglang_qspec.messages import OverloadLevel
from sglang_qspec.trie import Source

SHORTEST_S = 0.5
"""Shortest time, in seconds, without a submission beyond the limit."""
LONGEST_S = 60.0
"""Longest time, in seconds, without a submission beyond the limit."""
GROWTH = 8
"""Smallest increase of the limit, in submissions."""


def fewer(completions: int, overload: int) -> int:
    """Number of completions to ask for instead of `completions`, at least 1."""
    if overload >= OverloadLevel.FIRST:
        return min(completions, 1)
    if overload >= OverloadLevel.HALF:
        return -(-completions // 2)
    return completions


def completions_of(live: LiveRequest, demand: Demand, overload: int) -> int:
    """Number of completions to ask for, for a request; fewer while the sidecar is overloaded."""
    if not demand.may(live, Source.QUEUE):
        return 0
    if overload and not live.waits and demand.asks_steps(live):
        return 0
    return fewer(live.controls.completions, overload)


class Backpressure:
    """Limits the open submissions after the sidecar has declined one because of overload.

    The limit is the number of submissions that were open when the sidecar declined. It grows by an
    eighth, or by GROWTH, after each wait that the sidecar asked for, and ends with the overload.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limit: int | None = None
        """Maximum number of open submissions; None without a limit."""
        self._wait_s = SHORTEST_S
        self._grow_at = 0.0

    def note_declined(self, open_submissions: int, retry_after_s: float) -> None:
        """Note that the sidecar declined a submission, and keeps `open_submissions` others."""
        self._wait_s = min(max(retry_after_s, SHORTEST_S), LONGEST_S)
        self._grow_at = self._clock() + self._wait_s
        self._limit = open_submissions

    def allow(self, open_submissions: int, overload: int) -> bool:
        """Whether the server may open another submission of a waiting request."""
        if self._limit is None:
            return True
        now = self._clock()
        if now >= self._grow_at:
            if overload < OverloadLevel.DECLINE:
                self._limit = None
                return True
            self._limit += max(GROWTH, self._limit // 8)
            self._grow_at = now + self._wait_s
        return open_submissions < self._limit
