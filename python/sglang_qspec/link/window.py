"""Counts the bytes sent to the sidecar that it has not confirmed to have read.

A limit in messages is not enough, because a queue of long prompts may hold gigabytes. Messages
arrive in order, so the answer to a Ping confirms all bytes that were sent before the Ping.
"""

from __future__ import annotations

from collections import deque


class Window:
    """Bytes sent and bytes confirmed as read, on one connection."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.reset()

    @property
    def unread(self) -> int:
        """Number of bytes that the sidecar may not have read."""
        return self._sent - self._read

    def fits(self, size: int) -> bool:
        """Whether `size` more bytes stay within the limit."""
        return self.unread + size <= self._limit

    def sent(self, size: int) -> None:
        self._sent += size

    def asked(self, number: int) -> None:
        """Record that Ping `number` was sent after the bytes so far. Numbers increase."""
        self._asked.append((number, self._sent))

    def answered(self, number: int) -> None:
        """Confirm the bytes sent before Ping `number`; unknown numbers are ignored."""
        if all(number != asked for asked, _ in self._asked):
            return
        while self._asked and self._asked[0][0] <= number:
            _, self._read = self._asked.popleft()

    def reset(self) -> None:
        """Start over on a new connection; unread bytes of the old one are lost."""
        self._sent = 0
        self._read = 0
        self._asked: deque[tuple[int, int]] = deque()
