"""A time as a function of the number of requests, interpolated between measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

FLOOR = 0.5
"""Lower limit of extrapolated values, as a share of the outermost value."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Linear interpolation between points, and extrapolation beyond them; one point is a
    constant."""

    places: tuple[float, ...]
    """Positions in rising order."""
    values: tuple[float, ...]
    """The value at each place."""

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """The curve through at least one point; if places are equal, the last point counts."""
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
