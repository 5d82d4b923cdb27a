"""Runs of cells, made up."""

from __future__ import annotations

from typing import Any

from benchmark.parallel.counters import Counters, Passes
from benchmark.parallel.journal import Entry
from benchmark.parallel.plan import (
    AHEAD,
    AUTO,
    AUTO_STEP,
    BASELINES,
    HALVES,
    QUEUE,
    SEQUENTIAL,
    SEQUENTIAL_HALF,
)
from benchmark.parallel.serving import CellRun, Gap, Served

REQUESTS, TOKENS, PASSES = 6, 11, 5
"""Of every run: tokens of a request, and the passes after its prompt's that gave all but one."""

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


def passes_of(
    *, verify_s: float = 0.03, waited_s: float = 0.001, passes: int = 10, batch: int = 3
) -> Passes:
    return Passes(passes, passes * batch, 5 * passes * batch, passes * verify_s, passes * waited_s)


def counters_of(
    name: str = "halves", *, draft_s: float = 0.02, batch: int = 3, **passes: Any
) -> Counters:
    """Of ten passes, each with drafting of its own."""
    counted = passes_of(batch=batch, **passes)
    return Counters({name: counted, "queue": Passes()}, counted.passes * draft_s, 100, 50)


def run_of(
    decoded_per_s: float = 30.0,
    *,
    prefill_s: float = 0.5,
    counters: Counters | None = None,
    output: str = "same",
    passes: int = PASSES,
    gaps: tuple[Gap, ...] = (),
) -> CellRun:
    """All requests alike; decoding takes what the rate says."""
    decoded = REQUESTS * (TOKENS - 1)
    one = Served(output, TOKENS, latency=2.0, service=1.0, passes=passes)
    return CellRun(
        decoded / decoded_per_s + prefill_s, prefill_s, (one,) * REQUESTS, counters, gaps=gaps
    )


def entry_of(
    config: str,
    *,
    number: int = 1,
    in_flight: int = 4,
    k: int = 4,
    decoded_per_s: float | None = None,
    draft_s: float = 0.03,
    waited_s: float = 0.001,
) -> Entry:
    """A cell at the speed of DECODED_PER_S, unless it is given one; V is 30 ms."""
    speed = decoded_per_s or DECODED_PER_S[config]
    counters = (
        None if config in BASELINES else counters_of(config, draft_s=draft_s, waited_s=waited_s)
    )
    if config in (AUTO, AUTO_STEP):
        counters = counters_of(HALVES, draft_s=draft_s, waited_s=waited_s)
    return Entry(number, in_flight, k, False, config, run_of(speed, counters=counters))


def streamed_entry(config: str, *, in_flight: int = 4, k: int = 4) -> Entry:
    counters = None if config in BASELINES else counters_of()
    gaps = (Gap(0.04, 4), Gap(0.06, 1))
    return Entry(1, in_flight, k, True, config, run_of(counters=counters, gaps=gaps))


def block_entries(in_flight: int = 4, k: int = 4, number: int = 1) -> list[Entry]:
    """All configurations of a block."""
    return [entry_of(name, number=number, in_flight=in_flight, k=k) for name in DECODED_PER_S]
