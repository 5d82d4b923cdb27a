"""The figures of a run: a row for each configuration and load, over all rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from benchmark.harness.cells import Cell, Value
from benchmark.harness.report import Table
from benchmark.harness.run import Run, identical_share
from benchmark.harness.statistics import Medians, Ratio, percent, ratio_record, rounded

Load = Mapping[str, Any]
"""The dimensions of a load by name."""
Rounds = Mapping[int, Run]
"""Runs by the number of the round."""
FIGURES = (
    "tokens_per_s",
    "decode_tokens_per_s",
    "latency_mean",
    "latency_p99",
    "service_mean",
    "service_p99",
    "accept_len",
    "match_rate",
    "passes_per_token",
    "proposed_per_pass",
    "accepted_per_pass",
    "drafted",
    "wasted",
    "verify_s",
    "draft_s",
    "waited_s",
    "hidden_share",
    "batch",
    "width",
)
"""Fields of a Run with a median in the JSON line; the median is null if no run has the figure."""
DIGITS = 4


@dataclass(frozen=True)
class Row:
    """A configuration with one load, over all rounds."""

    config: str
    load: Load
    rounds: Rounds
    plain: Rounds
    """Runs of the baseline with this load; empty for the baseline, and if it was not served."""

    @cached_property
    def figures(self) -> Medians:
        return Medians(tuple(self.rounds.values()))

    @property
    def speedup(self) -> Ratio | None:
        """Tokens per second over those of the baseline."""
        return Ratio.of(self.rounds, self.plain)

    @property
    def identical(self) -> float | None:
        """Share of the requests with the output of the baseline; the smallest of all rounds."""
        both = self.rounds.keys() & self.plain.keys()
        return min((identical_share(self.rounds[n], self.plain[n]) for n in both), default=None)

    @property
    def accepted(self) -> Counter[str]:
        """Accepted draft tokens by source, over all rounds."""
        return sum((run.accepted for run in self.rounds.values()), Counter())

    @property
    def others_share(self) -> float:
        """Largest share of all processors that other processes took in a round."""
        return max(run.others_share for run in self.rounds.values())

    def record(self) -> dict[str, Any]:
        """For the line of JSON; a benchmark may add figures of its own."""
        accepted = self.accepted
        shares = {name: n / accepted.total() for name, n in accepted.items() if n}
        found = {
            **self.load,
            "config": self.config,
            **{name: getattr(self.figures, name) for name in FIGURES},
            "accepted_share_by_source": shares,
            "identical": self.identical,
            "others_share": self.others_share,
            "retried": sum(run.retried for run in self.rounds.values()),
            "rounds": len(self.rounds),
        }
        return {**rounded(found, DIGITS), **ratio_record("speedup", self.speedup, DIGITS)}


class Summary:
    """The rows of a run, and ratios between configurations with the same load.

    A row is compared with the runs of the configuration `baseline`. The baseline's load has all
    dimensions of the row's load, or fewer if it does not depend on the others.
    """

    def __init__(
        self, runs: Mapping[Cell, Run], baseline: str, configs: Sequence[str] = ()
    ) -> None:
        """Rows are in the order of their loads, and of `configs` or of the runs."""
        self._rounds: dict[tuple[tuple[str, Value], ...], dict[str, dict[int, Run]]] = {}
        for cell, run in sorted(runs.items(), key=_order_of(runs)):
            by_config = self._rounds.setdefault(cell.load, {})
            by_config.setdefault(cell.config, {})[cell.round] = run
        self.rows = [
            Row(config, dict(load), by_config[config], self._of_baseline(baseline, config, load))
            for load, by_config in self._rounds.items()
            for config in (configs or by_config)
            if config in by_config
        ]

    @property
    def configs(self) -> list[str]:
        """The configurations that were served."""
        return list(dict.fromkeys(row.config for row in self.rows))

    def values(self, dimension: str) -> list[Any]:
        """The values of a dimension in all loads that have it."""
        return list(
            dict.fromkeys(row.load[dimension] for row in self.rows if dimension in row.load)
        )

    def row(self, config: str, load: Load) -> Row | None:
        """The row of a configuration and a load; None if it was not served."""
        return next((row for row in self.rows if (row.config, row.load) == (config, load)), None)

    def ratio(
        self,
        config: str,
        other: str,
        load: Load,
        other_load: Load | None = None,
        figure: Callable[[Run], float] = lambda run: run.tokens_per_s,
    ) -> Ratio | None:
        """A figure over that of another configuration; None if no round has both.

        The load of the other is `load` as well, or `other_load`.
        """
        ours, theirs = self.row(config, load), self.row(other, other_load or load)
        return Ratio.of(ours.rounds, theirs.rounds, figure) if ours and theirs else None

    def _of_baseline(
        self, baseline: str, config: str, load: tuple[tuple[str, Value], ...]
    ) -> Rounds:
        if config == baseline:
            return {}
        fits = (by for other, by in self._rounds.items() if set(other) <= set(load))
        return next((by[baseline] for by in fits if baseline in by), {})


COLUMNS: Mapping[str, Callable[[Row], object]] = {
    "config": lambda row: row.config,
    "tokens/s": lambda row: f"{row.figures.tokens_per_s:.1f}",
    "decoding": lambda row: f"{row.figures.decode_tokens_per_s:.1f}",
    "speedup": lambda row: row.speedup,
    "mean lat. (s)": lambda row: row.figures.latency_mean,
    "p99 lat. (s)": lambda row: row.figures.latency_p99,
    "accept length": lambda row: row.figures.accept_len,
    "match rate": lambda row: row.figures.match_rate,
    "passes/token": lambda row: row.figures.passes_per_token,
    "proposed": lambda row: row.figures.proposed_per_pass,
    "accepted": lambda row: row.figures.accepted_per_pass,
    "drafted": lambda row: row.figures.drafted,
    "wasted": lambda row: row.figures.wasted,
    "hidden": lambda row: percent(row.figures.hidden_share),
    "V (ms)": lambda row: milliseconds(row.figures.verify_s),
    "D (ms)": lambda row: milliseconds(row.figures.draft_s),
    "waited (ms)": lambda row: milliseconds(row.figures.waited_s),
    "identical": lambda row: percent(row.identical),
    "others": lambda row: percent(row.others_share),
}
"""Columns of tables by their heads."""


def table(
    title: str,
    rows: Sequence[Row],
    heads: Sequence[str],
    note: str = "",
    more: Mapping[str, Callable[[Row], object]] = MappingProxyType({}),
) -> Table:
    """A line for each row. A head is one of COLUMNS or `more`, or a dimension of the loads."""
    known = {**COLUMNS, **more}
    columns = {head: known.get(head, _dimension(head)) for head in heads}
    return Table.of(title, rows, columns, note)


def _dimension(head: str) -> Callable[[Row], object]:
    def value(row: Row) -> object:
        found = row.load.get(head.replace(" ", "_"))
        return f"{found:g}" if isinstance(found, float) else found

    return value


def milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.1f}"


def _order_of(runs: Mapping[Cell, Run]) -> Callable[[tuple[Cell, Run]], tuple[float, ...]]:
    """A sort key: loads by their numbers, and by the first appearance of their texts."""
    found = (value for cell in runs for _, value in cell.load if isinstance(value, str))
    texts = {text: place for place, text in enumerate(dict.fromkeys(found))}

    def key(item: tuple[Cell, Run]) -> tuple[float, ...]:
        values = (value for _, value in item[0].load)
        return tuple(texts[one] if isinstance(one, str) else float(one or 0) for one in values)

    return key
