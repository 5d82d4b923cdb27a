"""Computes medians, percentiles, and ratios with their spread over paired rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmark.harness.run import Run

SPREADS = (
    "Ratios are medians over rounds, each of two neighbouring runs; the smallest and the largest "
    "are in brackets. A ratio of one round has no spread."
)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def median(values: Iterable[float | None]) -> float | None:
    """Median of the values that are not None; None without such values."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def rounded(value: Any, digits: int = 3) -> Any:
    """`value` with `digits` decimals in each float, also inside mappings, lists and tuples."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return value


@dataclass(frozen=True)
class Ratio:
    """Quotients of paired rounds, at least one, in the order of the rounds."""

    values: tuple[float, ...]

    @classmethod
    def of(
        cls,
        runs: Mapping[int, Run],
        others: Mapping[int, Run],
        figure: Callable[[Run], float] = lambda run: run.tokens_per_s,
    ) -> Ratio | None:
        """The ratios of a figure in the common rounds; None without common rounds."""
        shared = sorted(runs.keys() & others.keys())
        found = tuple(figure(runs[number]) / figure(others[number]) for number in shared)
        return cls(found) if found else None

    @classmethod
    def smallest(cls, ratios: Iterable[Ratio | None]) -> Ratio | None:
        """The ratio with the smallest median; None without ratios."""
        return min(filter(None, ratios), key=lambda ratio: ratio.median, default=None)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The smallest and the largest quotient; None for one round."""
        return (min(self.values), max(self.values)) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if self.spread is None:
            return f"{self.median:.2f} (one round)"
        return f"{self.median:.2f} ({self.spread[0]:.2f} to {self.spread[1]:.2f})"


def ratio_record(name: str, ratio: Ratio | None, digits: int = 3) -> dict[str, Any]:
    """For JSON: the median as `name`, its spread, and the number of rounds."""
    if ratio is None:
        return {name: None, f"{name}_spread": None, f"{name}_rounds": 0}
    return {
        name: round(ratio.median, digits),
        f"{name}_spread": rounded(ratio.spread, digits),
        f"{name}_rounds": len(ratio.values),
    }


@dataclass(frozen=True)
class Medians:
    """Each figure of Run as an attribute: its median over the runs that have it, or None."""

    runs: tuple[Run, ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return median(getattr(run, name) for run in self.runs)


def number(value: object | None) -> str:
    """A figure for a table, with two decimals; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
