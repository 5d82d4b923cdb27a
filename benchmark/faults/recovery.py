"""Throughput around a moment, from the times at which tokens came."""

from __future__ import annotations

from collections.abc import Sequence

STEP_S = 0.1

Events = Sequence[tuple[float, int]]
"""(when, how many tokens came); in any order."""


def rate(events: Events, begin: float, end: float) -> float:
    """Tokens per second in [begin, end)."""
    return sum(count for when, count in events if begin <= when < end) / (end - begin)


def seconds_until(
    events: Events, begin: float, wanted: float, window: float, limit: float
) -> float | None:
    """How long after `begin` the tokens per second of a whole window are first `wanted` or more.

    In steps of STEP_S. None if that does not happen within `limit`; all times are in seconds.
    """
    for step in range(round(limit / STEP_S) + 1):
        after = step * STEP_S
        if rate(events, begin + after, begin + after + window) >= wanted:
            return round(after, 3)
    return None


def bins(events: Events, origin: float, begin: float, end: float, width: float) -> list[float]:
    """Tokens per second in bins of `width` from `origin + begin` to `origin + end`, in seconds."""
    count = round((end - begin) / width)
    edges = [origin + begin + number * width for number in range(count)]
    return [rate(events, edge, edge + width) for edge in edges]
