"""Computes the ratios of `bench_peers`: QSPEC over the fastest peer, and over plain SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.harness import charts
from benchmark.harness.report import Figure, Report, Table
from benchmark.harness.rounds import MeasuredRounds, identical
from benchmark.harness.run import Run
from benchmark.harness.statistics import Ratio, number, percent, ratio_record, rounded
from benchmark.peers.load import Cell
from benchmark.peers.servers import NAMES, OWN, QSPEC, SGLANG

NOTE = (
    "over SGLang: tokens per second over those of SGLang without speculation; same: share of the "
    "answers that SGLang without speculation gives too; others: largest share of the processors "
    "that other processes took in a round"
)
METHOD = """Each round has prompts of its own for each number of requests in flight, until the file
has no more. All servers answer them in turn, in an order that reverses from round to round; the
other servers are stopped meanwhile. Answers are greedy; `spread` is the largest deviation of their
lengths from the average, as a share. bfloat16 kernels differ between servers, so equal answers are
not expected of other projects."""


@dataclass(frozen=True)
class Row(MeasuredRounds):
    """A server with some number of requests in flight."""

    peer: str
    in_flight: int
    over_sglang: Ratio | None
    same: float | None
    """Share of the answers that SGLang without speculation gives too, from 0 to 1."""

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        names = ("peer", "in_flight", "tokens_per_s", "same", "others_share")
        found = {name: getattr(self, name) for name in names}
        return {**rounded(found), **ratio_record("over_sglang", self.over_sglang)}


COLUMNS: Mapping[str, Callable[[Row], object]] = {
    "server": lambda row: row.peer,
    "in flight": lambda row: row.in_flight,
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "over SGLang": lambda row: row.over_sglang or "",
    "same": lambda row: percent(row.same),
    "others": lambda row: percent(row.others_share),
}


class Summary:
    """All rows by requests in flight, and the ratio that has a goal."""

    def __init__(self, runs: Mapping[Cell, Run]) -> None:
        self._levels: dict[int, dict[str, dict[int, Run]]] = {}
        for cell, run in runs.items():
            configs = self._levels.setdefault(cell.in_flight, {})
            configs.setdefault(cell.config, {})[cell.round] = run
        self.rows = [
            _row(level, name, configs)
            for level, configs in sorted(self._levels.items())
            for name in NAMES
            if name in configs
        ]

    def over_best_peer(self, level: int) -> Ratio | None:
        """QSPEC over the peer with the smallest ratio; None without a peer or common rounds."""
        configs = self._levels[level]
        ratios = [
            Ratio.of(configs.get(QSPEC, {}), rounds)
            for name, rounds in configs.items()
            if name not in OWN
        ]
        return min(filter(None, ratios), key=lambda ratio: ratio.median, default=None)

    @property
    def over_best_peer_min(self) -> Ratio | None:
        """The smallest of `over_best_peer` over all numbers of requests in flight."""
        ratios = map(self.over_best_peer, self._levels)
        return min(filter(None, ratios), key=lambda ratio: ratio.median, default=None)

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {
            **ratio_record("over_best_peer_min", self.over_best_peer_min),
            "over_best_peer": {
                str(level): ratio_record("ratio", self.over_best_peer(level))
                for level in sorted(self._levels)
            },
            "rows": [row.record() for row in self.rows],
        }

    def report(self, failed: Mapping[str, str], facts: Mapping[str, Any]) -> Report:
        """A table, and a chart."""
        table = Table.of("Servers", self.rows, COLUMNS, NOTE)
        headline = f"QSPEC over the fastest peer, at least: {number(self.over_best_peer_min)}."
        title = "Throughput beside other servers"
        return Report(title, headline, [table], METHOD, facts, self._figures(), failed)

    def _figures(self) -> tuple[Figure, ...]:
        """Tokens per second by requests in flight, a line per server; empty without matplotlib."""
        if not charts.available():
            return ()
        lines: dict[str, dict[float, float]] = {}
        for row in self.rows:
            lines.setdefault(row.peer, {})[row.in_flight] = row.tokens_per_s
        colors = dict(zip(NAMES, charts.COLORS, strict=False))
        axes = ("requests in flight", "tokens/s")
        svg = charts.lines({"": lines}, *axes, colors=colors) if lines else None
        caption = "Output tokens per second of each server on the same processors."
        return (Figure("throughput", "Throughput by requests in flight", caption, svg),)


def _row(level: int, name: str, configs: Mapping[str, Mapping[int, Run]]) -> Row:
    rounds, plain = configs[name], configs.get(SGLANG, {})
    if name == SGLANG:
        return Row(rounds, name, level, None, None)
    return Row(rounds, name, level, Ratio.of(rounds, plain), identical(rounds, plain))
