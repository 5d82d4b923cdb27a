"""How long requests wait for their first draft."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW = 1000
"""Requests that the percentiles look back on."""


class FirstDrafts:
    """Seconds from a request's queueing to the first tokens that the sidecar drafted for it."""

    def __init__(self) -> None:
        self.count = 0
        """Requests that got a draft since the start."""
        self.observer: Callable[[float], object] | None = None
        """Told of each time as it is taken: a metric that keeps its own account."""
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def observe(self, seconds: float) -> None:
        """Take in one request's time."""
        self.count += 1
        self._latest.append(seconds)
        if self.observer is not None:
            self.observer(seconds)

    def percentile(self, share: float) -> float | None:
        """The time that `share` (0 to 1) of the latest requests stayed within; None without any."""
        times = sorted(self._latest)
        if not times:
            return None
        return times[min(len(times) - 1, int(share * len(times)))]

    def describe(self) -> dict[str, float | None]:
        """For /server_info, in seconds; the percentiles are of the latest `WINDOW` requests."""
        return {
            "count": self.count,
            "p50": self.percentile(0.5),
            "p99": self.percentile(0.99),
        }
