"""How long a pass may last while requests of a higher priority are likely to come.

A request that arrives waits for the end of the pass that runs then. Drafts lengthen a pass where
rows cost time, as on a CPU. So a pass over requests of a low priority verifies few draft tokens
while requests of a higher priority arrive: their clients wait for the first token, and the output
tokens of the others may come later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

RECENT_S = 30.0
"""Time after an arrival in which another request of this priority is likely, in seconds."""
LONGEST = 1.2
"""Maximum time of a pass then, as a multiple of a pass without drafts. With 1.2, chats beside
a batch waited 1.3 times as long for the first token as alone (docs/results.md)."""


class Precedence:
    """Remembers when a request of the highest priority arrived.

    A smaller priority comes first, as in the ranks of a queue. All requests have the same one
    unless the server has priorities.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = math.inf
        """The priority that comes first among those of recent arrivals."""
        self._arrived = -math.inf

    def arrive(self, priority: int) -> None:
        """Note that a request of this priority has arrived."""
        if priority <= self._first or not self._is_recent:
            self._first, self._arrived = priority, self._clock()

    def longest_pass(self, priorities: Iterable[int]) -> float:
        """How many times as long a pass over these requests may take as one without drafts.

        `priorities` has the priority of each request. `math.inf` if there is no limit.
        """
        outranked = self._is_recent and any(each > self._first for each in priorities)
        return LONGEST if outranked else math.inf

    @property
    def _is_recent(self) -> bool:
        return self._clock() < self._arrived + RECENT_S
