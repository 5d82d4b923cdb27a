"""Computes the figures of `bench_tensor_parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmark.harness import charts
from benchmark.harness.report import Figure, Report, Table
from benchmark.harness.rounds import MeasuredRounds, identical
from benchmark.harness.run import Run
from benchmark.harness.statistics import Ratio, percent, ratio_record, rounded
from benchmark.tensor_parallel.cells import CONFIGS, NONE, QSPEC, Cell

METHOD = """Both servers answer the same prompts greedily, in turn; the other one is stopped
meanwhile. Each collective operation of the devices' group takes the delay longer on every rank.
Counts are those of rank 0; they include prefills."""


@dataclass(frozen=True)
class Row(MeasuredRounds):
    """A server at one delay."""

    config: str
    delay_ms: float
    speedup: Ratio | None
    same: float | None
    """Share of the answers that the server without speculation gives too, from 0 to 1."""

    @property
    def collectives_per_token(self) -> float:
        """Collective operations of a rank for each output token."""
        return median(run.collectives / run.tokens for run in self.rounds.values())

    @property
    def bytes_per_token(self) -> float:
        """Bytes in collective operations of a rank for each output token."""
        return median(run.collective_bytes / run.tokens for run in self.rounds.values())

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        names = ("config", "delay_ms", "tokens_per_s", "collectives_per_token", "bytes_per_token")
        found = {name: getattr(self, name) for name in (*names, "same")}
        return {**rounded(found), **ratio_record("speedup", self.speedup)}


COLUMNS: Mapping[str, Callable[[Row], object]] = {
    "delay (ms)": lambda row: f"{row.delay_ms:g}",
    "server": lambda row: row.config,
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "over none": lambda row: row.speedup or "",
    "collectives/token": lambda row: f"{row.collectives_per_token:.1f}",
    "KB/token": lambda row: f"{row.bytes_per_token / 1e3:.0f}",
    "same": lambda row: percent(row.same),
}


class Summary:
    """All rows by delay."""

    def __init__(self, runs: Mapping[Cell, Run]) -> None:
        found: dict[float, dict[str, dict[int, Run]]] = {}
        for cell, run in runs.items():
            configs = found.setdefault(cell.delay_ms, {})
            configs.setdefault(cell.config, {})[cell.round] = run
        self.rows = [
            _row(delay, name, configs)
            for delay, configs in sorted(found.items())
            for name in CONFIGS
            if name in configs
        ]

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        first = {row.config: row for row in reversed(self.rows)}
        return {
            "collectives_per_token": {
                name: round(row.collectives_per_token, 2) for name, row in first.items()
            },
            "speedup_by_delay_ms": {
                f"{row.delay_ms:g}": ratio_record("speedup", row.speedup)
                for row in self.rows
                if row.config == QSPEC
            },
            "rows": [row.record() for row in self.rows],
        }

    def report(self, failed: Mapping[str, str], facts: Mapping[str, Any]) -> Report:
        """A table, and a chart."""
        table = Table.of("Delays", self.rows, COLUMNS, "same: answers equal to those of none")
        title = "Several ranks with slow links"
        headline = "QSPEC over no speculation, by the delay of each collective operation."
        return Report(title, headline, [table], METHOD, facts, self._figures(), failed)

    def _figures(self) -> tuple[Figure, ...]:
        """The speedup by delay; empty without matplotlib."""
        if not charts.available():
            return ()
        line = {row.delay_ms: row.speedup.median for row in self.rows if row.speedup is not None}
        axes = ("delay of a collective operation (ms)", "tokens/s over no speculation")
        colors = {QSPEC: charts.COLORS[0]}
        svg = charts.lines({"": {QSPEC: line}}, *axes, colors=colors) if line else None
        caption = "Output tokens per second of QSPEC over those of no speculation."
        return (Figure("speedup", "Speedup by delay", caption, svg),)


def _row(delay: float, name: str, configs: Mapping[str, Mapping[int, Run]]) -> Row:
    rounds, plain = configs[name], configs.get(NONE, {})
    if name == NONE:
        return Row(rounds, name, delay, None, None)
    return Row(rounds, name, delay, Ratio.of(rounds, plain), identical(rounds, plain))
