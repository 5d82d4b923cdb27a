"""Times from queueing a request to its first draft."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW = 1000
"""Number of latest requests that the percentiles cover."""


class FirstDrafts:
    """Seconds from queueing a request to its first tokens from the sidecar."""

    def __init__(self) -> None:
        self.count = 0
        """Number of requests that got a draft since the server started."""
        self.observer: Callable[[float], object] | None = None
        """Called with the seconds of each request, to fill a histogram; None without metrics."""
        self._latest: deque[float] = deque(maxlen=WINDOW)

    def observe(self, seconds: float) -> None:
        """Record the time of one request."""
        self.count += 1
        self._latest.append(seconds)
        if self.observer is not None:
            self.observer(seconds)

    def percentile(self, share: float) -> float | None:
        """Quantile `share` (0 to 1) over the latest requests, in seconds; None before the first."""
        times = sorted(self._latest)
        if not times:
            return None
        return times[min(len(times) - 1, int(share * len(times)))]

    def describe(self) -> dict[str, float | None]:
        """For /server_info: the count, and percentiles in seconds over the latest requests."""
        return {
            "count": self.count,
            "p50": self.percentile(0.5),
            "p99": self.percentile(0.99),
        }
