"""What the runs amount to: each configuration against no speculation, and adaptive against fixed.

Ratios are of one round, where the two were served one soon after the other; medians over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark.harness.report import markdown_table, text_table
from benchmark.worst.cases import ADAPTIVE, BASELINE, width_of
from benchmark.worst.journal import Entry

HEAD = ("case", "in flight", "config", "tokens/s", "over none", "proposed", "accepted", "others")


@dataclass(frozen=True)
class Row:
    """A configuration in a case, at some number of requests in flight."""

    case: str
    running: int
    config: str
    rounds: int
    tokens_per_s: float
    ratio: float | None
    """Tokens per second over those of no speculation."""
    accept_length: float
    """Tokens of a request and pass, the target's own included."""
    proposed_per_pass: float
    """Draft tokens of a request."""
    others_share: float
    """Largest of the rounds: of all processors, what went to others."""

    def cells(self) -> tuple[str, ...]:
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        return (
            self.case,
            str(self.running),
            self.config,
            f"{self.tokens_per_s:.1f}",
            ratio,
            f"{self.proposed_per_pass:.2f}",
            f"{self.accept_length - 1:.2f}",
            f"{self.others_share:.0%}",
        )

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


class Summary:
    """All rows in the order of the runs, and the two figures that have goals."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        found: dict[tuple[str, int], dict[str, list[Entry]]] = {}
        for entry in entries:
            configs = found.setdefault((entry.case, entry.running), {})
            configs.setdefault(entry.config, []).append(entry)
        self.rows = [
            _row(runs, configs.get(BASELINE, ()))
            for configs in found.values()
            for runs in configs.values()
        ]
        self._by_load = found

    @property
    def worst_ratio(self) -> float | None:
        """The least of adaptive over no speculation; None before both have served a case."""
        ratios = [row.ratio for row in self.rows if row.config == ADAPTIVE]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    @property
    def adaptive_over_best_fixed_min(self) -> float | None:
        """Over the fixed width that is fastest at as many requests; None without any."""
        found = []
        for configs in self._by_load.values():
            ratios = [
                _median_ratio(configs.get(ADAPTIVE, ()), runs)
                for config, runs in configs.items()
                if width_of(config) is not None
            ]
            known = [ratio for ratio in ratios if ratio is not None]
            if known:
                found.append(min(known))
        return min(found, default=None)

    def record(self) -> dict[str, Any]:
        """For the line of JSON."""
        worst, adaptive = self.worst_ratio, self.adaptive_over_best_fixed_min
        return {
            "worst_ratio": None if worst is None else round(worst, 3),
            "adaptive_over_best_fixed_min": None if adaptive is None else round(adaptive, 3),
            "rows": [row.record() for row in self.rows],
        }

    def table(self) -> str:
        return "\n".join(text_table([HEAD, *(row.cells() for row in self.rows)]))

    def markdown(self) -> str:
        return markdown_table(HEAD, [row.cells() for row in self.rows])


def _row(runs: Sequence[Entry], baseline: Sequence[Entry]) -> Row:
    first = runs[0]
    passes = max(1, sum(entry.run.passes for entry in runs))
    return Row(
        first.case,
        first.running,
        first.config,
        len(runs),
        statistics.median(entry.run.tokens_per_s for entry in runs),
        None if first.config == BASELINE else _median_ratio(runs, baseline),
        1.0 + sum(entry.run.accepted for entry in runs) / passes,
        sum(entry.run.proposed for entry in runs) / passes,
        max(entry.run.others_share for entry in runs),
    )


def _median_ratio(runs: Iterable[Entry], others: Iterable[Entry]) -> float | None:
    """Of tokens per second in the rounds that both have served; None if there is none."""
    rates = {entry.round: entry.run.tokens_per_s for entry in others}
    ratios = [e.run.tokens_per_s / rates[e.round] for e in runs if e.round in rates]
    return statistics.median(ratios) if ratios else None
