"""Computes ratios of `bench_worst_case`: QSPEC over no speculation, adaptive over fixed widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.harness import charts
from benchmark.harness.report import Figure, Report, Table
from benchmark.harness.rounds import MeasuredRounds
from benchmark.harness.run import Run
from benchmark.harness.statistics import Ratio, number, percent, ratio_record, rounded
from benchmark.worst.cases import ADAPTIVE, BASELINE, SHOWN, Cell, width_of

NOTE = (
    "proposed, accepted: draft tokens of a request in a pass; others: largest share of the "
    "processors that other processes took in a round"
)
METHOD = """All configurations serve a case before the next case, in an order that reverses from
round to round; the other servers are stopped meanwhile. Ratios are of tokens per second."""


@dataclass(frozen=True)
class Row(MeasuredRounds):
    """A configuration in a case, with some number of requests in flight."""

    case: str
    running: int
    config: str
    ratio: Ratio | None
    """Tokens per second over those of no speculation."""

    @property
    def accept_length(self) -> float:
        """Output tokens of a request per pass."""
        return 1.0 + self._per_pass(sum(run.accepted.total() for run in self.rounds.values()))

    @property
    def proposed_per_pass(self) -> float:
        """Draft tokens of a request in a pass."""
        return self._per_pass(sum(run.proposed for run in self.rounds.values()))

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        names = ("case", "running", "config", "tokens_per_s", "accept_length", "proposed_per_pass")
        found = {name: getattr(self, name) for name in (*names, "others_share")}
        ratio = ratio_record("ratio", self.ratio, 4)
        return {**rounded(found, 4), **ratio, "rounds": len(self.rounds)}

    def _per_pass(self, tokens: int) -> float:
        if self.config == BASELINE:
            return 0.0
        return tokens / max(1, sum(run.passes for run in self.rounds.values()))


COLUMNS: Mapping[str, Callable[[Row], object]] = {
    "case": lambda row: row.case,
    "in flight": lambda row: row.running,
    "config": lambda row: row.config,
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "over none": lambda row: row.ratio or "",
    "proposed": lambda row: row.proposed_per_pass,
    "accepted": lambda row: row.accept_length - 1,
    "others": lambda row: percent(row.others_share),
}


class Summary:
    """All rows in the order of the runs, and the two ratios that have goals."""

    def __init__(self, runs: Mapping[Cell, Run]) -> None:
        self._loads: dict[tuple[str, int], dict[str, dict[int, Run]]] = {}
        for cell, run in runs.items():
            configs = self._loads.setdefault((cell.case, cell.running), {})
            configs.setdefault(cell.config, {})[cell.round] = run
        self.rows = [
            Row(rounds, case, running, config, _over(rounds, configs, config))
            for (case, running), configs in self._loads.items()
            for config, rounds in configs.items()
        ]

    @property
    def worst_ratio(self) -> Ratio | None:
        """The smallest ratio of adaptive over no speculation; None without common rounds."""
        ratios = [row.ratio for row in self.rows if row.config == ADAPTIVE and row.ratio]
        return min(ratios, key=lambda ratio: ratio.median, default=None)

    @property
    def adaptive_over_best_fixed_min(self) -> Ratio | None:
        """The smallest ratio of adaptive over the fastest fixed width at the same load."""
        ratios = [
            Ratio.of(configs.get(ADAPTIVE, {}), rounds)
            for configs in self._loads.values()
            for config, rounds in configs.items()
            if width_of(config) is not None
        ]
        return min(filter(None, ratios), key=lambda ratio: ratio.median, default=None)

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {
            **ratio_record("worst_ratio", self.worst_ratio),
            **ratio_record("adaptive_over_best_fixed_min", self.adaptive_over_best_fixed_min),
            "rows": [row.record() for row in self.rows],
        }

    def report(self, failed: Mapping[str, str], facts: Mapping[str, Any]) -> Report:
        """A table, and a chart."""
        table = Table.of("Cases", self.rows, COLUMNS, NOTE)
        headline = (
            f"Adaptive width over no speculation, at least: {number(self.worst_ratio)}. Over the "
            f"fastest fixed width, at least: {number(self.adaptive_over_best_fixed_min)}."
        )
        title, drawn = "The cost of drafts that do not pay", self.figures()
        return Report(title, headline, [table], METHOD, facts, drawn, failed)

    def figures(self) -> tuple[Figure, ...]:
        """The speedup by requests in flight, a line for each case; empty without matplotlib."""
        if not charts.available():
            return ()
        lines: dict[str, dict[float, float]] = {}
        for row in self.rows:
            if row.config == ADAPTIVE and row.ratio is not None:
                lines.setdefault(SHOWN[row.case], {})[row.running] = row.ratio.median
        colors = dict(zip(SHOWN.values(), charts.COLORS, strict=True))
        axes = ("requests in flight; dashed: no speculation", "speedup (× tokens/s)")
        svg = charts.lines({"": lines}, *axes, colors=colors, reference=1.0) if lines else None
        title = "Speedup by requests in flight"
        caption = "Tokens per second of QSPEC with adaptive width over those of no speculation."
        return (Figure("speedup", title, caption, svg),)


def _over(
    rounds: Mapping[int, Run], configs: Mapping[str, Mapping[int, Run]], config: str
) -> Ratio | None:
    return None if config == BASELINE else Ratio.of(rounds, configs.get(BASELINE, {}))
