"""How many lines of a batch a server should have while others use it too.

While others have requests at the server, lines get half of the places in the running batch that
these leave free. So the next request of others finds a free place and short passes, and no line
waits at the server. When the others have gone, the number of lines doubles in `DOUBLING_S` up to
the depth, so the requests of a steady stream find few lines.

The server counts all requests together. A count may be older than what the client knows of its own
lines, so as many requests are taken for own ones as there were lines within the last `LAG_S`.
"""

from __future__ import annotations

from collections import deque

DOUBLING_S = 4.0
"""Time in which the number of lines doubles when there is room, in seconds."""
LAG_S = 2.0
"""Maximum time from the end of a line until the server does not count it any more, in seconds."""
SHARE = 0.5
"""Share of the free places that lines get beside requests of others. The rest is for arrivals."""


class Room:
    """The number of lines that one server may have."""

    def __init__(self) -> None:
        self._own: deque[tuple[float, int]] = deque()
        """Times and numbers of own lines within LAG_S."""
        self._grown: float | None = None
        """The number of lines, with the part of the next one; None before the first look."""
        self._at = 0.0

    def observe(self, requests: int, own: int, depth: int, slots: int, now: float) -> int:
        """The number of lines that the server may have from now on, at least one.

        `requests` is the number that the server counts, running and waiting, `own` the number of
        lines that it has, `depth` the number that it should have without others, and `slots` the
        size of its running batch. `now` is in seconds.
        """
        self._own.append((now, own))
        while self._own[0][0] < now - LAG_S:
            self._own.popleft()
        others = max(0, requests - max(lines for _, lines in self._own))
        most = max(1.0, SHARE * (slots - others)) if others else float(depth)
        if self._grown is not None:
            most = min(most, self._grown * 2 ** ((now - self._at) / DOUBLING_S))
        self._grown, self._at = most, now
        return int(most)
