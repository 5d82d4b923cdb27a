"""The figures of a run of `bench_batch_parallel`, with latencies between streamed tokens."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmark.harness.cells import Cell, Value
from benchmark.harness.run import Gap, Run
from benchmark.harness.statistics import Ratio, percentile, ratio_record, rounded
from benchmark.harness.summary import DIGITS, Load, Row, Summary
from benchmark.parallel import plan
from benchmark.parallel.plan import NAMES, PIPELINES


class Streamed(NamedTuple):
    """Inter-token latencies in the streaming rounds, in seconds."""

    itl_mean: float
    """Mean from token to token; the tokens of a piece share the time since the piece before it."""
    itl_p99: float
    chunk_gap_p99: float
    """99th percentile of the time from piece to piece."""


class Results(Summary):
    """The rows of all rounds that were not streamed, and the gaps of the streamed ones."""

    def __init__(self, runs: Mapping[Cell, Run]) -> None:
        whole = {cell: run for cell, run in runs.items() if not cell["streamed"]}
        super().__init__(whole, plan.BASELINE, NAMES)
        self._gaps: dict[tuple[str, Value, Value], list[Gap]] = {}
        for cell in runs.keys() - whole.keys():
            key = (cell.config, cell["in_flight"], cell["k"])
            self._gaps.setdefault(key, []).extend(runs[cell].gaps)

    @property
    def levels(self) -> list[int]:
        """Numbers of requests in flight."""
        return self.values("in_flight")

    @property
    def ks(self) -> list[int]:
        return sorted(self.values("k"))

    def decode_ratio(
        self, config: str, other: str, load: Load, other_load: Load | None = None
    ) -> Ratio | None:
        """As `ratio`, but of decoded tokens per second, without the prefill time."""
        return self.ratio(config, other, load, other_load, lambda run: run.decode_tokens_per_s)

    def speedup(self, row: Row) -> Ratio | None:
        """Tokens/s over no speculation on the target's cores, with equal requests in flight."""
        return None if row.config == plan.SEQUENTIAL_HALF else row.speedup

    def equal_hardware(self, row: Row) -> Ratio | None:
        """Tokens/s over no speculation on the cores of target and sidecar."""
        if row.config == plan.SEQUENTIAL_HALF:
            return None
        load = {"in_flight": row.load["in_flight"]}
        return self.ratio(row.config, plan.BASELINE_ALL_CORES, row.load, load)

    def streamed(self, row: Row) -> Streamed | None:
        """The latencies of the streaming rounds; None if the row has none."""
        gaps = self._gaps.get((row.config, row.load["in_flight"], row.load.get("k")))
        return streamed(gaps) if gaps else None

    def record(self, row: Row) -> dict[str, Any]:
        """For JSON."""
        latencies = self.streamed(row)
        more = {
            "pipeline": row.config,
            "k": row.load.get("k"),
            "in_flight": running(row),
            "step_tokens": step_tokens(row),
            **(latencies._asdict() if latencies else dict.fromkeys(Streamed._fields)),
            **ratio_record("speedup", self.speedup(row), DIGITS),
            **ratio_record("equal_hardware_speedup", self.equal_hardware(row), DIGITS),
            "used": used(row),
        }
        return {**row.record(), **{name: rounded(value, DIGITS) for name, value in more.items()}}


def running(row: Row) -> int:
    """Requests that run at once."""
    return plan.running(row.config, row.load["in_flight"])


def used(row: Row) -> dict[str, float]:
    """Share of the verify passes by pipeline."""
    counts: Counter[str] = Counter()
    for run in row.rounds.values():
        for name, counted in (run.counters.pipelines if run.counters else {}).items():
            counts[name] += int(counted["passes"])
    return {name: count / counts.total() for name, count in counts.items() if count}


def step_tokens(row: Row) -> int | None:
    """Maximum number of draft tokens ahead of the committed output; None for the baselines."""
    pipeline, k = PIPELINES.get(row.config), row.load.get("k")
    if pipeline is None or not isinstance(k, int):
        return None
    return pipeline.runtime(k)["qspec_step_tokens"]


def streamed(gaps: Sequence[Gap]) -> Streamed:
    """The latencies of all tokens except those of each answer's first piece."""
    each = [gap.seconds / gap.tokens for gap in gaps for _ in range(gap.tokens)]
    return Streamed(
        statistics.mean(each), percentile(each, 0.99), percentile([g.seconds for g in gaps], 0.99)
    )
