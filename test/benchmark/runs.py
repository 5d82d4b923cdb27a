"""Made-up runs of `bench_queue`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmark.harness.run import Answer, Counters, Run
from benchmark.queueing.load import Cell


def answer(
    tokens: int = 10,
    *,
    passes: int | None = None,
    proposed: int = 0,
    accepted: Mapping[str, int] | None = None,
    latency: float = 2.0,
    service: float = 1.0,
    first_id: int = 0,
) -> Answer:
    """An answer of `tokens` ids from `first_id` on; by default one pass per token but the first."""
    return Answer(
        output_ids=tuple(range(first_id, first_id + tokens)),
        latency=latency,
        service=service,
        passes=tokens - 1 if passes is None else passes,
        proposed=proposed,
        accepted=accepted or {},
    )


def run(*answers: Answer, seconds: float = 2.0, drafted: int | None = None) -> Run:
    counters = None if drafted is None else Counters({}, drafted, 0.0, 0)
    return Run(seconds, tuple(answers), counters=counters)


def round_of(number: int, names: Sequence[str]) -> dict[Cell, Run]:
    """A round of two groups; every configuration except `none` is twice as fast."""
    found = {}
    for name in names:
        plain = name.startswith("none")
        seconds = 4.0 if plain else 2.0
        one = (
            answer(service=2.0)
            if plain
            else answer(passes=4, proposed=10, accepted={"queue": 3, "output": 2})
        )
        drafted = 40 if name.startswith("qspec") else None
        found[Cell(number, "qa", 0, name)] = run(one, one, seconds=seconds, drafted=drafted)
        found[Cell(number, "rag", 0, name)] = run(one, seconds=seconds, drafted=drafted)
    return found
