"""Counts what goes wrong, and logs each kind of it at most once a minute."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

LOG_INTERVAL_S = 60.0


class Faults:
    """Owns the counts of one end of a link, or of a drafter."""

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        *,
        owner: str = "link",
    ) -> None:
        """`owner` begins every line of the log."""
        self._owner = owner
        self._logger = logger
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def __getitem__(self, kind: str) -> int:
        return self._counts[kind]

    def note(self, kind: str, detail: object, *, traceback: bool = False) -> None:
        """Count one fault of `kind` (few and fixed); `detail` is for the log.

        `detail` may quote a peer: it is cut and escaped. With `traceback` the log shows that of
        the exception that is being handled.
        """
        self._counts[kind] += 1
        if self.is_due(kind):
            count, shown = self._counts[kind], quote(str(detail))
            self._logger.warning(
                "%s: %s (%d so far): %s", self._owner, kind, count, shown, exc_info=traceback
            )

    def is_due(self, kind: str) -> bool:
        """Whether a line of this kind may be logged now; if so, the next one is due in a minute."""
        now = self._clock()
        logged_at = self._logged_at.get(kind)
        if logged_at is not None and now - logged_at < LOG_INTERVAL_S:
            return False
        self._logged_at[kind] = now
        return True


def quote(text: str, limit: int = 300) -> str:
    """What a peer wrote, fit for one line of a log."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )
