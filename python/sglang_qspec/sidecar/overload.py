"""Decides which work the drafter skips while it is too slow for several servers.

A single server never causes overload, because the order of its queue begins with the most valuable
drafts (`sidecar/draft_queue.py`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from sglang_qspec.config import MAX_BACKLOG_S
from sglang_qspec.link import Peer
from sglang_qspec.messages import Declined, OverloadLevel, Submit
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.pass_statistics import PassStatistics
from sglang_qspec.sidecar.text import Completion, Kind, Place

LOOK_S = 1.0
"""Interval, in seconds, at which the level rises or falls by one."""
RATE_MEMORY_S = 10.0
"""Time constant, in seconds, of the rate at which a server takes requests from its queue."""
RETRY_AFTER_S = 2.0
"""Time, in seconds, after which a server may submit a declined request again."""


@dataclass
class _Line:
    """The waiting requests of one server."""

    waiting: int = 0
    """Number of open submissions that the target does not serve yet."""
    left: int = 0
    """Number of requests that stopped waiting since the latest look."""
    rate: float = 0.0
    """Number of requests that stop waiting per second."""

    def measure(self, elapsed_s: float) -> None:
        """Update the rate after `elapsed_s` seconds."""
        weight = 1 - math.exp(-elapsed_s / RATE_MEMORY_S)
        self.rate += weight * (self.left / elapsed_s - self.rate)
        self.left = 0


class Overload:
    """Owns the level of overload, and chooses the work that the drafter skips.

    A server's backlog is the time that the drafter needs for its step drafts and first completions.
    Each server with unfinished work gets an equal part of the drafter. A server is *late* if its
    backlog exceeds both `max_backlog_s` and the time in which its target will empty the queue.
    While one of at least two servers with work is late, the level rises by one every second;
    otherwise it falls.
    """

    def __init__(
        self,
        queue: FairQueue,
        statistics: PassStatistics,
        max_backlog_s: float = MAX_BACKLOG_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._statistics = statistics
        self._max_backlog_s = max_backlog_s
        self._clock = clock
        self._looked_at = clock()
        self._lines: defaultdict[Peer, _Line] = defaultdict(_Line)
        self._late: frozenset[Peer] = frozenset()
        """Servers that were late at the latest look."""
        self.level = OverloadLevel.NONE
        self.left_out = 0
        """Number of completions that overload ended, since the start."""

    @property
    def backlog_s(self) -> float:
        """Seconds until all step drafts and first completions are drafted, at the recent speed."""
        return sum(self._seconds_for(peer) for peer in self._queue.busy)

    def enter(self, peer: Peer) -> None:
        """Note that a request of this server waits."""
        self._lines[peer].waiting += 1

    def leave(self, peer: Peer) -> None:
        """Note that a request waits no longer: its target serves it, or it was closed."""
        line = self._lines[peer]
        line.waiting -= 1
        line.left += 1

    def drop(self, peer: Peer) -> None:
        """Forget a disconnected server."""
        self._lines.pop(peer, None)
        self._late -= {peer}

    def look(self) -> None:
        """Update the level, at most every LOOK_S seconds. Call this often, also while idle."""
        elapsed_s = self._clock() - self._looked_at
        if elapsed_s < LOOK_S:
            return
        self._looked_at += elapsed_s
        for line in self._lines.values():
            line.measure(elapsed_s)
        busy = self._queue.busy
        late = [peer for peer in busy if self._is_late(peer, len(busy))]
        self._late = frozenset(late) if len(busy) > 1 else frozenset()
        change = 1 if self._late else -int(elapsed_s / LOOK_S)
        self.level = OverloadLevel(max(0, min(max(OverloadLevel), self.level + change)))

    def objection(self, peer: Peer, submit: Submit, place: Place) -> Declined | None:
        """Return the message that declines a submission in overload; None if it is accepted.

        The sidecar accepts the next requests of every server, and each Submit without completions,
        because step drafts may follow it.
        """
        declines = self.level >= OverloadLevel.DECLINE and peer in self._late
        if not (declines and submit.completions and self._queue.is_far_back(peer, place)):
            return None
        reason = (
            f"overload: the sidecar has a backlog of {self.backlog_s:.0f} s and serves several "
            "servers; it drafts for the next requests of each"
        )
        return Declined(submit.submission, reason, retry=True, retry_after_s=RETRY_AFTER_S)

    def leaves_out(self, completion: Completion) -> bool:
        """Whether the drafter ends this completion, which is next in turn."""
        level, prompt = self.level, completion.text
        if completion.kind is Kind.STEP or not level:
            return False
        if prompt.place is None:
            return True
        if completion.kind is Kind.FIRST:
            is_long = 2 * len(completion.token_ids) >= prompt.limit
            return level >= OverloadLevel.SHORT and prompt.owner in self._late and is_long
        if level >= OverloadLevel.FIRST:
            return True
        number = prompt.completions.index(completion)
        return level >= OverloadLevel.HALF and 2 * number >= len(prompt.completions)

    def check_integrity(self) -> None:
        """Raise AssertionError if a server has a negative number of waiting requests."""
        assert all(line.waiting >= 0 for line in self._lines.values()), "a count is negative"

    def _is_late(self, peer: Peer, servers: int) -> bool:
        line = self._lines.get(peer, _Line())
        seconds = servers * self._seconds_for(peer)
        return seconds > self._max_backlog_s and seconds * line.rate > line.waiting

    def _seconds_for(self, peer: Peer) -> float:
        """Seconds for the step drafts and first completions of one server."""
        speed = self._statistics.tokens_per_s
        mean = self._statistics.completion_len
        typical = math.inf if mean is None else mean
        return self._queue.urgent_tokens(peer, typical) / speed if speed else 0.0
