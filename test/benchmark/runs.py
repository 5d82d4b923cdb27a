"""Runs of configurations, made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmark.queueing.serving import Answer, GroupRun


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
    *answers: Answer, group: str = "qa", seconds: float = 2.0, drafted: int | None = None
) -> list[GroupRun]:
    return [GroupRun(group, seconds, tuple(answers), drafted)]


def configurations(names: Sequence[str]) -> dict[str, list[GroupRun]]:
    """A round of two groups; whatever is not `none` is twice as fast."""
    served = {}
    for name in names:
        plain = name.startswith("none")
        seconds = 4.0 if plain else 2.0
        one = (
            answer(service=2.0)
            if plain
            else answer(passes=4, proposed=10, accepted={"queue": 3, "output": 2})
        )
        drafted = 40 if name.startswith("qspec") else None
        served[name] = [
            *run(one, one, group="qa", seconds=seconds, drafted=drafted),
            *run(one, group="rag", seconds=seconds, drafted=drafted),
        ]
    return served
