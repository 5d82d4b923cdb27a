"""How many bytes are on their way to the sidecar and not known to have been read.

A queue that is bounded in messages may hold gigabytes of long prompts. The link is in order, so
the answer to a Ping says that all before it was read; what came after is the window.
"""

from __future__ import annotations

from collections import deque


class Window:
    """Counts bytes sent and bytes known to be read, on one connection."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.reset()

    @property
    def unread(self) -> int:
        """Bytes that the sidecar may not have read."""
        return self._sent - self._read

    def fits(self, size: int) -> bool:
        """Whether `size` bytes more stay within the limit."""
        return self.unread + size <= self._limit

    def sent(self, size: int) -> None:
        self._sent += size

    def asked(self, number: int) -> None:
        """Ping `number` was sent after all that was sent so far. Numbers grow."""
        self._asked.append((number, self._sent))

    def answered(self, number: int) -> None:
        """Ping `number` was answered; earlier answers may have been dropped.

        A number that was not asked says nothing.
        """
        if all(number != asked for asked, _ in self._asked):
            return
        while self._asked and self._asked[0][0] <= number:
            _, self._read = self._asked.popleft()

    def reset(self) -> None:
        """A new connection: what was on its way on the old one is gone."""
        self._sent = 0
        self._read = 0
        self._asked: deque[tuple[int, int]] = deque()
