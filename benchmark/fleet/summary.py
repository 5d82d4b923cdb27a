"""Computes the figures of `bench_fleet`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmark.harness.report import Table
from benchmark.harness.statistics import medians, rounded

PARTS = ("model", "sampling", "link", "idle")
"""Timed parts of the loop; the rest is the drafter's own work."""
Figures = Mapping[str, Any]
"""The figures of a model with a number of tenants, by name."""


def _share_of(part: str) -> Callable[[Figures], object]:
    return lambda row: f"{row[f'{part}_share']:.0%}"


COLUMNS: Mapping[str, Callable[[Figures], object]] = {
    "model": lambda row: row["model"],
    "tenants": lambda row: row["tenants"],
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "spread": lambda row: "{:.0f} to {:.0f}".format(*row["tokens_per_s_spread"]),
    "over the first": lambda row: row["over_one"],
    "request (ms)": lambda row: "-" if row["request_ms"] is None else f"{row['request_ms']:.0f}",
    "fairness": lambda row: row["fairness"],
    **{f"{part} %": _share_of(part) for part in (*PARTS[:3], "drafter", "idle")},
    "sidecar CPU": lambda row: row["sidecar_cpu"],
    "tenants CPU": lambda row: row["tenants_cpu"],
}
NOTE = (
    "Medians over the rounds; the spread is of tokens/s. Percentages are of the loop's time. "
    "Fairness is the tokens of the tenant with the fewest over the mean. CPU is in cores."
)


def summarize(runs: Mapping[tuple[str, int], Sequence[Mapping[str, float]]]) -> list[Figures]:
    """For each model and number of tenants the medians of the rounds, in `runs`.

    `over_one` are tokens per second over those of the fewest tenants of this model; medians of
    both. `request_ms` is None if no request ended in one of the rounds.
    """
    rows = []
    first: dict[str, float] = {}
    for (model, tenants), rounds in runs.items():
        found = medians(rounds)
        speeds = [run["tokens_per_s"] for run in rounds]
        base = first.setdefault(model, speed := found["tokens_per_s"] or 0.0)
        shares = {f"{name}_share": found.pop(name) or 0.0 for name in PARTS}
        row = {
            "model": model,
            "tenants": tenants,
            "over_one": speed / base if base else None,
            **found,
            **shares,
            "tokens_per_s_spread": (min(speeds), max(speeds)),
            "drafter_share": max(0.0, 1 - sum(shares.values())),
        }
        rows.append(rounded(row))
    return rows


def table(title: str, rows: Sequence[Figures]) -> Table:
    """For the terminal."""
    return Table.of(title, rows, COLUMNS, NOTE)
