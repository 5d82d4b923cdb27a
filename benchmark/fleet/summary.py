"""Computes the figures of `bench_fleet`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness.report import Table
from benchmark.harness.statistics import rounded

Runs = Sequence[Mapping[str, float]]
"""The figures of one number of tenants, by round."""


PARTS = ("model", "sampling", "link", "idle")
"""Timed parts of the loop; the rest is the drafter's own work."""


@dataclass(frozen=True)
class Row:
    """Medians of a model and a number of tenants."""

    model: str
    tenants: int
    medians: Mapping[str, float]
    spread: tuple[float, float]
    """Smallest and largest tokens per second of a round."""
    over_one: float | None
    """Tokens per second over those of the fewest tenants of this model; medians of both."""

    @property
    def drafter(self) -> float:
        """Share of the time in the drafter's own work, from 0 to 1."""
        return max(0.0, 1 - sum(self.medians[name] for name in PARTS))

    @property
    def request_ms(self) -> float | None:
        """Time of a request; None if no request ended in one of the rounds."""
        found = self.medians["request_ms"]
        return None if math.isnan(found) else found

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        found = {"model": self.model, "tenants": self.tenants, "over_one": self.over_one}
        spread = {"tokens_per_s_spread": self.spread, "drafter_share": self.drafter}
        shares = {f"{name}_share": self.medians[name] for name in PARTS}
        rest = {name: each for name, each in self.medians.items() if f"{name}_share" not in shares}
        record: dict[str, Any] = rounded(
            {**found, **rest, "request_ms": self.request_ms, **shares, **spread}
        )
        return record


COLUMNS: Mapping[str, Callable[[Row], object]] = {
    "model": lambda row: row.model,
    "tenants": lambda row: row.tenants,
    "tokens/s": lambda row: f"{row.medians['tokens_per_s']:.0f}",
    "spread": lambda row: f"{row.spread[0]:.0f} to {row.spread[1]:.0f}",
    "over the first": lambda row: row.over_one,
    "request (ms)": lambda row: "-" if row.request_ms is None else f"{row.request_ms:.0f}",
    "fairness": lambda row: row.medians["fairness"],
    "model %": lambda row: f"{row.medians['model']:.0%}",
    "sampling %": lambda row: f"{row.medians['sampling']:.0%}",
    "link %": lambda row: f"{row.medians['link']:.0%}",
    "drafter %": lambda row: f"{row.drafter:.0%}",
    "idle %": lambda row: f"{row.medians['idle']:.0%}",
    "sidecar CPU": lambda row: row.medians["sidecar_cpu"],
    "tenants CPU": lambda row: row.medians["tenants_cpu"],
}
NOTE = (
    "Medians over the rounds; the spread is of tokens/s. Percentages are of the loop's time. "
    "Fairness is the tokens of the tenant with the fewest over the mean. CPU is in cores."
)


def summarize(runs: Mapping[tuple[str, int], Runs]) -> list[Row]:
    """A row for each model and number of tenants."""
    rows = []
    first: dict[str, float] = {}
    for (model, tenants), rounds in runs.items():
        medians = {name: _median([run[name] for run in rounds]) for name in rounds[0]}
        speeds = [run["tokens_per_s"] for run in rounds]
        base = first.setdefault(model, medians["tokens_per_s"])
        over_one = medians["tokens_per_s"] / base if base else None
        rows.append(Row(model, tenants, medians, (min(speeds), max(speeds)), over_one))
    return rows


def _median(values: Sequence[float]) -> float:
    """The median; nan if any value is nan, which has no place in an order."""
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def table(title: str, rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return Table.of(title, rows, COLUMNS, NOTE)
