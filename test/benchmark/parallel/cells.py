"""Made-up runs of `bench_batch_parallel`."""

from __future__ import annotations

from benchmark.harness.cells import Cell
from benchmark.harness.run import Answer, Counters, Gap, Run
from benchmark.parallel.plan import (
    AHEAD,
    AUTO,
    AUTO_STEP,
    BASELINES,
    HALVES,
    QUEUE,
    SEQUENTIAL,
    SEQUENTIAL_HALF,
    load_of,
)
from test.benchmark.runs import counters_of

REQUESTS, TOKENS, PASSES = 6, 11, 5
"""Requests of every run, output tokens per request, and decode passes per request. The prefill
gives the first output token."""

DECODED_PER_S = {
    "none": 10.0,
    "none-equal": 15.0,
    QUEUE: 20.0,
    SEQUENTIAL_HALF: 16.0,
    SEQUENTIAL: 20.0,
    HALVES: 30.0,
    AHEAD: 27.0,
    AUTO: 29.4,
    AUTO_STEP: 30.0,
}


def run_of(
    decoded_per_s: float = 30.0,
    *,
    prefill_s: float = 0.5,
    counters: Counters | None = None,
    first_id: int = 0,
    passes: int = PASSES,
    gaps: tuple[Gap, ...] = (),
) -> Run:
    """A run of equal requests that decodes `decoded_per_s` tokens per second."""
    decoded = REQUESTS * (TOKENS - 1)
    ids = tuple(range(first_id, first_id + TOKENS))
    one = Answer(ids, latency=2.0, service=1.0, passes=passes)
    return Run(
        decoded / decoded_per_s + prefill_s,
        (one,) * REQUESTS,
        prefill_seconds=prefill_s,
        counters=counters,
        gaps=gaps,
    )


Runs = dict[Cell, Run]


def one_run(
    config: str,
    *,
    number: int = 1,
    in_flight: int = 4,
    k: int = 4,
    decoded_per_s: float | None = None,
    draft_s: float = 0.03,
    waited_s: float = 0.001,
) -> Runs:
    """One cell with the speed `decoded_per_s`, by default that of DECODED_PER_S; V is 30 ms."""
    speed = decoded_per_s or DECODED_PER_S[config]
    counted = HALVES if config in (AUTO, AUTO_STEP) else config
    counters = None
    if config not in BASELINES:
        counters = counters_of(counted, draft_s=draft_s, waited_s=waited_s)
    return {cell_of(config, number, in_flight, k): run_of(speed, counters=counters)}


def cell_of(
    config: str, number: int = 1, in_flight: int = 4, k: int = 4, streamed: bool = False
) -> Cell:
    return Cell.of(number, config, **load_of(config, in_flight, k, streamed))


def streamed_run(config: str, *, in_flight: int = 4, k: int = 4) -> Runs:
    counters = None if config in BASELINES else counters_of()
    gaps = (Gap(0.04, 4), Gap(0.06, 1))
    cell = cell_of(config, in_flight=in_flight, k=k, streamed=True)
    return {cell: run_of(counters=counters, gaps=gaps)}


def block_runs(in_flight: int = 4, k: int = 4, number: int = 1) -> Runs:
    """Runs of every configuration in one block."""
    return together(
        *(one_run(name, number=number, in_flight=in_flight, k=k) for name in DECODED_PER_S)
    )


def together(*runs: Runs) -> Runs:
    return {cell: run for some in runs for cell, run in some.items()}
