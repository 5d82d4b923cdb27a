"""A run of the benchmark: its rounds, and the row of each configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.queueing.configurations import ALL_CORES, BASELINE, BASELINE_ALL_CORES, LARGEST
from benchmark.queueing.journal import Entry
from benchmark.queueing.measures import (
    Measures,
    Round,
    match_rates,
    measure,
    medians,
    request_speedups,
)
from benchmark.queueing.serving import BlockRun


@dataclass(frozen=True)
class Row:
    """One configuration over all rounds."""

    config: str
    overall: Measures
    by_group: Mapping[str, Measures]
    match_rates: Sequence[float]
    """Of each request in each round, as are the speedups."""
    request_speedups: Sequence[float]
    equal_hardware_speedup: float | None
    """Tokens/s over those of no speculation, both on the cores of target and sidecar together.

    None if a run for it is missing.
    """

    def record(self) -> dict[str, Any]:
        """For JSON: rates and counts as in Measures, latencies in seconds."""
        fields = ("speedup", "accept_len", "match_rate", "tokens_per_s")
        return {
            "config": self.config,
            "equal_hardware_speedup": _rounded(self.equal_hardware_speedup),
            **_record(self.overall),
            "by_group": {
                name: {field: _rounded(getattr(group, field)) for field in fields}
                for name, group in self.by_group.items()
            },
        }


@dataclass(frozen=True)
class Failure:
    """A configuration that could not be served, and why."""

    config: str
    reason: str

    def record(self) -> dict[str, Any]:
        return {"config": self.config, "speedup": None, "error": self.reason}


@dataclass(frozen=True)
class Summary:
    """All that a report shows of the configurations."""

    rows: Sequence[Row]
    failures: Sequence[Failure]
    blocks: int
    """Those that were served by all rows, over all rounds, and that the figures are of."""

    @property
    def equal_hardware_speedup(self) -> float | None:
        """That of the most completions."""
        found = [row.equal_hardware_speedup for row in self.rows if row.config == LARGEST]
        return found[0] if found else None

    def records(self) -> list[dict[str, Any]]:
        """For JSON; what failed comes last."""
        return [row.record() for row in self.rows] + [fail.record() for fail in self.failures]


def summarize(
    entries: Iterable[Entry], configs: Sequence[str], failed: Mapping[str, str]
) -> Summary:
    """The rows of `configs`, in their order; `failed` are reasons by configuration.

    A block counts once all configurations but those that failed have served it in that round, so
    that all rows are of the same prompts. A configuration is compared with `none` of its round.
    """
    served = [config for config in configs if config not in failed]
    rounds = common(entries, served)
    rows = [_row(config, rounds) for config in served] if rounds else []
    failures = [Failure(config, failed[config]) for config in configs if config in failed]
    return Summary(rows, failures, sum(len(one[served[0]]) for one in rounds))


def common(entries: Iterable[Entry], configs: Sequence[str]) -> list[Round]:
    """The rounds of `configs`, each with the blocks that all of them served, in one order."""
    found: dict[int, dict[tuple[str, int], dict[str, BlockRun]]] = {}
    for entry in entries:
        if entry.config in configs:
            blocks = found.setdefault(entry.round, {})
            blocks.setdefault((entry.run.group, entry.run.part), {})[entry.config] = entry.run
    rounds: list[Round] = []
    for blocks in found.values():
        whole = [block for block in blocks.values() if len(block) == len(configs)]
        if whole:
            rounds.append({config: [block[config] for block in whole] for config in configs})
    return rounds


def _row(config: str, rounds: Sequence[Round]) -> Row:
    pairs = [(served[config], served.get(BASELINE)) for served in rounds]
    groups = dict.fromkeys(run.group for runs, _ in pairs for run in runs)
    return Row(
        config,
        medians([measure(runs, plain) for runs, plain in pairs]),
        {group: _of_group(group, pairs) for group in groups},
        [rate for runs, _ in pairs for rate in match_rates(runs)],
        [
            speedup
            for runs, plain in pairs
            if plain is not None
            for speedup in request_speedups(runs, plain)
        ],
        _equal_hardware(ALL_CORES.get(config, config), rounds),
    )


def _equal_hardware(config: str, rounds: Sequence[Round]) -> float | None:
    measures = [
        measure(served[config], served[BASELINE_ALL_CORES])
        for served in rounds
        if config in served and BASELINE_ALL_CORES in served
    ]
    return medians(measures).speedup if measures else None


def _of_group(
    group: str, pairs: Sequence[tuple[Sequence[BlockRun], Sequence[BlockRun] | None]]
) -> Measures:
    def only(runs: Sequence[BlockRun]) -> list[BlockRun]:
        return [run for run in runs if run.group == group]

    return medians(
        [
            measure(only(runs), None if plain is None else only(plain))
            for runs, plain in pairs
            if only(runs)
        ]
    )


def _record(measures: Measures) -> dict[str, Any]:
    accepted = sum(measures.accepted.values())
    return {
        "speedup": _rounded(measures.speedup),
        "accept_len": _rounded(measures.accept_len),
        "match_rate": _rounded(measures.match_rate),
        "tokens": measures.tokens,
        "tokens_per_s": _rounded(measures.tokens_per_s),
        "mean_latency_s": _rounded(measures.mean_latency),
        "p99_latency_s": _rounded(measures.p99_latency),
        "passes_per_token": _rounded(measures.passes_per_token),
        "accepted_share_by_source": {
            source: _rounded(count / accepted)
            for source, count in measures.accepted.items()
            if count
        },
        "drafted": measures.drafted,
        "wasted": measures.wasted,
        "identical_share": _rounded(measures.identical),
        "retried": measures.retried,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
