"""Computes throughput and its recovery from the arrival times of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STEP_S = 0.1

Events = Sequence[tuple[float, int]]
"""(seconds, number of tokens that came then), in any order."""


def rate(events: Events, begin: float, end: float) -> float:
    """Tokens per second in [begin, end)."""
    return sum(count for when, count in events if begin <= when < end) / (end - begin)


def seconds_until(
    events: Events, begin: float, wanted: float, window: float, limit: float
) -> float | None:
    """Seconds from `begin` to the first window of `window` seconds with `wanted` tokens per second.

    Windows begin every STEP_S. None if no window that begins within `limit` seconds has the rate.
    """
    for step in range(round(limit / STEP_S) + 1):
        after = step * STEP_S
        if rate(events, begin + after, begin + after + window) >= wanted:
            return round(after, 3)
    return None


def bins(events: Events, origin: float, begin: float, end: float, width: float) -> list[float]:
    """Tokens per second in bins of `width` from `origin + begin` to `origin + end`, in seconds."""
    times, counts = zip(*events, strict=True) if events else ((), ())
    number = round((end - begin) / width)
    edges = origin + begin + width * np.arange(number + 1)
    sums, _ = np.histogram(times, edges, weights=counts)
    return [float(tokens) / width for tokens in sums]
