"""A run of the benchmark: its rounds, and the row of each configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.queueing.configurations import BASELINE, BASELINE_ALL_CORES, LARGEST
from benchmark.queueing.measures import (
    Measures,
    Round,
    match_rates,
    measure,
    medians,
    request_speedups,
)
from benchmark.queueing.serving import GroupRun


@dataclass(frozen=True)
class Row:
    """One configuration over all rounds."""

    config: str
    overall: Measures
    by_group: Mapping[str, Measures]
    match_rates: Sequence[float]
    """Of each request in each round, as are the speedups."""
    request_speedups: Sequence[float]

    def record(self) -> dict[str, Any]:
        """For JSON: rates and counts as in Measures, latencies in seconds."""
        fields = ("speedup", "accept_len", "match_rate", "tokens_per_s")
        return {
            "config": self.config,
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
    equal_hardware_speedup: float | None
    """Tokens/s of the most completions over no speculation on the same cores."""

    def records(self) -> list[dict[str, Any]]:
        """For JSON; what failed comes last."""
        return [row.record() for row in self.rows] + [fail.record() for fail in self.failures]


def summarize(
    rounds: Sequence[Round], configs: Sequence[str], failed: Mapping[str, str]
) -> Summary:
    """The rows of `configs`, in their order; `failed` are reasons by configuration.

    A configuration is compared with `none` of the same round.
    """
    rows = [_row(config, rounds) for config in configs if config not in failed]
    failures = [Failure(config, failed[config]) for config in configs if config in failed]
    equal = [
        measure(served[LARGEST], served[BASELINE_ALL_CORES])
        for served in rounds
        if LARGEST in served and BASELINE_ALL_CORES in served
    ]
    return Summary(rows, failures, medians(equal).speedup if equal else None)


def _row(config: str, rounds: Sequence[Round]) -> Row:
    pairs = [(served[config], served.get(BASELINE)) for served in rounds]
    groups = [run.group for run in pairs[0][0]]
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
    )


def _of_group(
    group: str, pairs: Sequence[tuple[Sequence[GroupRun], Sequence[GroupRun] | None]]
) -> Measures:
    def only(runs: Sequence[GroupRun]) -> list[GroupRun]:
        return [run for run in runs if run.group == group]

    return medians(
        [measure(only(runs), None if plain is None else only(plain)) for runs, plain in pairs]
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
        "differing": measures.differing,
        "identical": None if measures.differing is None else measures.differing == 0,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
