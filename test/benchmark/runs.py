"""Runs of configurations, made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmark.queueing.journal import Entry
from benchmark.queueing.serving import Answer, BlockRun


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
    """`tokens` ids from `first_id` on; by default each after the first took a pass."""
    return Answer(
        output_ids=tuple(range(first_id, first_id + tokens)),
        latency=latency,
        service=service,
        passes=tokens - 1 if passes is None else passes,
        proposed=proposed,
        accepted=accepted or {},
    )


def run(
    *answers: Answer,
    group: str = "qa",
    part: int = 0,
    seconds: float = 2.0,
    drafted: int | None = None,
) -> list[BlockRun]:
    return [BlockRun(group, part, seconds, tuple(answers), drafted)]


def entries(number: int, names: Sequence[str]) -> list[Entry]:
    """A round of two groups; whatever is not `none` is twice as fast."""
    written = []
    for name in names:
        plain = name.startswith("none")
        seconds = 4.0 if plain else 2.0
        one = (
            answer(service=2.0)
            if plain
            else answer(passes=4, proposed=10, accepted={"queue": 3, "output": 2})
        )
        drafted = 40 if name.startswith("qspec") else None
        written += [
            Entry(number, name, block)
            for block in (
                *run(one, one, group="qa", seconds=seconds, drafted=drafted),
                *run(one, group="rag", seconds=seconds, drafted=drafted),
            )
        ]
    return written
