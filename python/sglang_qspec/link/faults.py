"""Counts what goes wrong on a link, and logs each kind of it at most once a minute."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

LOG_INTERVAL_S = 60.0


class Faults:
    """Owns the counts of one end of a link."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def __getitem__(self, kind: str) -> int:
        return self._counts[kind]

    def note(self, kind: str, detail: object) -> None:
        """Count one fault of `kind` (few and fixed); `detail` is for the log.

        `detail` may quote a peer: it is cut and escaped.
        """
        self._counts[kind] += 1
        now = self._clock()
        logged_at = self._logged_at.get(kind)
        if logged_at is None or now - logged_at >= LOG_INTERVAL_S:
            self._logged_at[kind] = now
            self._logger.warning(
                "link: %s (%d so far): %s", kind, self._counts[kind], quote(str(detail))
            )


def quote(text: str, limit: int = 300) -> str:
    """What a peer wrote, fit for one line of a log."""
    cut = text if len(text) <= limit else text[:limit] + "..."
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )
