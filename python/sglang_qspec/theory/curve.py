"""A time as a function of the number of requests, from a few points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

FLOOR = 0.5
"""Of the outermost value, which a line that is continued never falls below."""


class Curve:
    """Straight lines between points, continued beyond the first and the last.

    A single point is a constant. Of several values at one place the last counts.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(dict(points).items())
        if not ordered:
            raise ValueError("a curve needs a point")
        self.places = tuple(place for place, _ in ordered)
        self.values = tuple(value for _, value in ordered)

    def __call__(self, place: float) -> float:
        places, values = self.places, self.values
        if len(places) == 1:
            return values[0]
        right = min(max(bisect_left(places, place), 1), len(places) - 1)
        left = right - 1
        share = (place - places[left]) / (places[right] - places[left])
        value = values[left] + share * (values[right] - values[left])
        if share < 0.0:
            return max(value, FLOOR * values[0])
        if share > 1.0:
            return max(value, FLOOR * values[-1])
        return value
