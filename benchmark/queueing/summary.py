"""Computes the figures of each configuration of `bench_queue`, over the blocks that all served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness.run import Run, identical_share, joined, pairs
from benchmark.harness.statistics import Medians, Ratio, ratio_record, rounded
from benchmark.queueing.configurations import ALL_CORES, BASELINE, BASELINE_ALL_CORES, LARGEST
from benchmark.queueing.load import Cell

Rounds = Mapping[int, Run]
"""The runs of a configuration by round; the runs of all blocks of a round are joined."""
_PLAIN = ("accept_len", "match_rate", "tokens", "tokens_per_s")
_LATENCIES = {"mean_latency_s": "latency_mean", "p99_latency_s": "latency_p99"}
_COUNTS = ("passes_per_token", "drafted", "wasted")
RECORDED = {name: name for name in _PLAIN} | _LATENCIES | {name: name for name in _COUNTS}
"""Fields of a Run with a median in the JSON line, by key."""


@dataclass(frozen=True)
class Row:
    """One configuration over all rounds, in all groups or in one."""

    config: str
    rounds: Rounds
    plain: Rounds
    """Runs without speculation on the target's cores; empty if it was not served."""

    @property
    def figures(self) -> Medians:
        return Medians(tuple(self.rounds.values()))

    @property
    def speedup(self) -> Ratio | None:
        """Tokens per second over those of no speculation."""
        return Ratio.of(self.rounds, self.plain)

    @property
    def accepted(self) -> Counter[str]:
        """Accepted draft tokens by source, over all rounds."""
        return sum((run.accepted for run in self.rounds.values()), Counter())

    @property
    def identical(self) -> float | None:
        """Share of the requests with the output of no speculation; the smallest of all rounds."""
        both = self.rounds.keys() & self.plain.keys()
        return min((identical_share(self.rounds[n], self.plain[n]) for n in both), default=None)

    @property
    def match_rates(self) -> list[float]:
        """Match rate of each request with proposed draft tokens."""
        rates = (answer.match_rate for run in self.rounds.values() for answer in run.answers)
        return [rate for rate in rates if rate is not None]

    @property
    def request_speedups(self) -> list[float]:
        """Service time per token without speculation over that with it, of each request.

        Service time excludes the queue, where the time depends on earlier requests.
        """
        return [
            (other.service / other.tokens) / (one.service / one.tokens)
            for number in sorted(self.rounds.keys() & self.plain.keys())
            for one, other in pairs(self.rounds[number], self.plain[number])
            if one.tokens and other.tokens
        ]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        accepted = self.accepted
        figures = {key: rounded(getattr(self.figures, name)) for key, name in RECORDED.items()}
        return {
            **ratio_record("speedup", self.speedup),
            **figures,
            "accepted_share_by_source": {
                source: round(count / accepted.total(), 3)
                for source, count in accepted.items()
                if count
            },
            "identical_share": rounded(self.identical),
            "retried": sum(run.retried for run in self.rounds.values()),
        }


@dataclass(frozen=True)
class Summary:
    """The rows of a report."""

    rows: Sequence[Row]
    by_group: Mapping[str, Sequence[Row]]
    """The rows of the same configurations in each group."""
    equal_hardware: Mapping[str, Ratio | None]
    """Tokens per second over no speculation; both have the cores of target and sidecar."""
    failed: Mapping[str, str]
    """Reasons why the session left configurations out, by configuration."""
    blocks: int
    """Number of blocks that all configurations have served, over all rounds."""

    def records(self) -> list[dict[str, Any]]:
        """For JSON; failed configurations come last."""
        fields = ("accept_len", "match_rate", "tokens_per_s")
        found: list[dict[str, Any]] = []
        for place, row in enumerate(self.rows):
            groups = {name: rows[place].record() for name, rows in self.by_group.items()}
            by_group = {
                name: {key: group[key] for key in group if key in fields or "speedup" in key}
                for name, group in groups.items()
            }
            equal = ratio_record("equal_hardware_speedup", self.equal_hardware[row.config])
            found.append({"config": row.config, **equal, **row.record(), "by_group": by_group})
        failures = self.failed.items()
        return found + [{"config": c, "speedup": None, "error": why} for c, why in failures]

    def record(self) -> dict[str, Any]:
        """For JSON: all rows, and the ratio at equal hardware of the most completions."""
        equal = self.equal_hardware.get(LARGEST)
        return {"rows": self.records(), **ratio_record("equal_hardware_speedup", equal)}


def summarize(
    runs: Mapping[Cell, Run], configs: Sequence[str], failed: Mapping[str, str]
) -> Summary:
    """The rows of `configs`, in their order, without the `failed` ones.

    A block of a round counts if all configurations have served it, so all rows have the same
    prompts.
    """
    served = [config for config in configs if config not in failed]
    blocks: dict[tuple[int, str, int], dict[str, Run]] = {}
    for cell, run in runs.items():
        if cell.config in served:
            blocks.setdefault((cell.round, cell.group, cell.part), {})[cell.config] = run
    whole = {key: block for key, block in blocks.items() if len(block) == len(served)}

    def rows(groups: set[str]) -> list[Row]:
        found: dict[str, dict[int, Run]] = {config: {} for config in served}
        for number in dict.fromkeys(key[0] for key in whole):
            keys = [key for key in whole if key[0] == number and key[1] in groups]
            for config in served if keys else ():
                found[config][number] = joined([whole[key][config] for key in keys])
        return [Row(config, found[config], found.get(BASELINE, {})) for config in served]

    groups = list(dict.fromkeys(key[1] for key in whole))
    every = rows(set(groups)) if whole else []
    rounds = {row.config: row.rounds for row in every}
    equal = {
        config: Ratio.of(
            rounds.get(ALL_CORES.get(config, config), {}), rounds.get(BASELINE_ALL_CORES, {})
        )
        for config in rounds
    }
    return Summary(every, {group: rows({group}) for group in groups}, equal, failed, len(whole))
