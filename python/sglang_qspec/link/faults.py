"""Counts faults by kind, and logs each kind at most once a minute."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

LOG_INTERVAL_S = 60.0
"""Minimum time between two log lines of one kind, in seconds."""
MAX_QUOTED = 300
"""Maximum length of a peer's text in a log line, in characters."""
DROPPED = "dropped message"
"""Kind of a message that could not be sent."""
MALFORMED = "malformed message"
"""Kind of a message, in either direction, that violates the protocol."""


class Faults:
    """Fault counts of one end of a link, or of a drafter."""

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        owner: str = "link",
    ) -> None:
        """`owner` is the prefix of each log line."""
        self._owner = owner
        self._logger = logger
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def __getitem__(self, kind: str) -> int:
        return self._counts[kind]

    def note(self, kind: str, detail: object, *, traceback: bool = False) -> None:
        """Count one fault of `kind`, one of a few fixed texts; `detail` is for the log.

        `detail` may quote a peer, so it is truncated and escaped. With `traceback` the log shows
        the traceback of the exception that is being handled.
        """
        self._counts[kind] += 1
        if self.is_due(kind):
            count, shown = self._counts[kind], quote(str(detail))
            self._logger.warning(
                "%s: %s (%d so far): %s", self._owner, kind, count, shown, exc_info=traceback
            )

    def is_due(self, kind: str) -> bool:
        """Whether to log a line of this kind now; if so, the next one is due in a minute."""
        now = self._clock()
        logged_at = self._logged_at.get(kind)
        if logged_at is not None and now - logged_at < LOG_INTERVAL_S:
            return False
        self._logged_at[kind] = now
        return True


def quote(text: str) -> str:
    """Truncate and escape a peer's text for one log line."""
    cut = text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )
