"""The figures of `bench_worst_case`: QSPEC over no speculation, and adaptive over fixed widths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.harness.report import Report, Table
from benchmark.harness.run import Run
from benchmark.harness.statistics import Medians, Ratio, number, percent, ratio_record, rounded
from benchmark.worst.cases import ADAPTIVE, BASELINE, Cell, width_of

HEAD = ("case", "in flight", "config", "tokens/s", "over none", "proposed", "accepted", "others")
NOTE = (
    "proposed, accepted: draft tokens of a request in a pass; others: the largest share of the "
    "processors that other processes took in a round"
)
METHOD = """All configurations serve a case one after another, in an order that reverses from round
to round; servers that do not serve are stopped. Ratios are of tokens per second."""


@dataclass(frozen=True)
class Row:
    """A configuration in a case, at some number of requests in flight."""

    case: str
    running: int
    config: str
    rounds: Mapping[int, Run]
    ratio: Ratio | None
    """Tokens per second over those of no speculation."""

    @property
    def tokens_per_s(self) -> float:
        found: float = Medians(tuple(self.rounds.values())).tokens_per_s
        return found

    @property
    def accept_length(self) -> float:
        """Tokens of a request in a pass, the target's own included."""
        return 1.0 + self._per_pass(sum(run.accepted.total() for run in self.rounds.values()))

    @property
    def proposed_per_pass(self) -> float:
        """Draft tokens of a request in a pass."""
        return self._per_pass(sum(run.proposed for run in self.rounds.values()))

    @property
    def others_share(self) -> float:
        """Largest share of all processors that other processes took in a round."""
        return max(run.others_share for run in self.rounds.values())

    def cells(self) -> list[str]:
        """The row of the table."""
        return [
            self.case,
            str(self.running),
            self.config,
            f"{self.tokens_per_s:.1f}",
            "" if self.ratio is None else str(self.ratio),
            number(self.proposed_per_pass),
            number(self.accept_length - 1),
            percent(self.others_share),
        ]

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


class Summary:
    """All rows in the order of the runs, and the two figures that have goals."""

    def __init__(self, runs: Mapping[Cell, Run]) -> None:
        self._loads: dict[tuple[str, int], dict[str, dict[int, Run]]] = {}
        for cell, run in runs.items():
            configs = self._loads.setdefault((cell.case, cell.running), {})
            configs.setdefault(cell.config, {})[cell.round] = run
        self.rows = [
            Row(case, running, config, rounds, _over(rounds, configs, config))
            for (case, running), configs in self._loads.items()
            for config, rounds in configs.items()
        ]

    @property
    def worst_ratio(self) -> Ratio | None:
        """The least of adaptive over no speculation; None before both have served a case."""
        ratios = [row.ratio for row in self.rows if row.config == ADAPTIVE and row.ratio]
        return min(ratios, key=lambda ratio: ratio.median, default=None)

    @property
    def adaptive_over_best_fixed_min(self) -> Ratio | None:
        """The least over the fixed width that is fastest at the same requests in flight."""
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
        """One table."""
        table = Table("Cases", HEAD, [row.cells() for row in self.rows], NOTE)
        headline = (
            f"Adaptive width over no speculation, at least: {number(self.worst_ratio)}. Over the "
            f"fastest fixed width, at least: {number(self.adaptive_over_best_fixed_min)}."
        )
        return Report(
            "What drafts that do not pay cost", headline, [table], METHOD, facts, (), failed
        )


def _over(
    rounds: Mapping[int, Run], configs: Mapping[str, Mapping[int, Run]], config: str
) -> Ratio | None:
    return None if config == BASELINE else Ratio.of(rounds, configs.get(BASELINE, {}))
