"""A time as a function of the number of requests, from a few points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

FLOOR = 0.5
"""Of the outermost value, which a line that is continued never falls below."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Straight lines between points, continued beyond the first and the last.

    A single point is a constant.
    """

    places: tuple[float, ...]
    """From the left to the right."""
    values: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Through at least one point; of several at one place the last counts."""
        return cls(*zip(*sorted(dict(points).items()), strict=True))

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
