"""Made-up runs, and a round of `bench_queue`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark.harness.cells import Cell
from benchmark.harness.run import Answer, Counters, Run


def answer(
    tokens: int = 10,
    *,
    passes: int | None = None,
    latency: float = 2.0,
    service: float = 1.0,
    first_id: int = 0,
    **drafts: Any,
) -> Answer:
    """An answer of `tokens` ids from `first_id` on; by default one pass per token but the first."""
    output_ids = tuple(range(first_id, first_id + tokens))
    return Answer(output_ids, latency, service, tokens - 1 if passes is None else passes, **drafts)


def run(*answers: Answer, seconds: float = 2.0, drafted: int | None = None) -> Run:
    counters = None if drafted is None else Counters({}, drafted, 0.0, 0)
    return Run(seconds, tuple(answers), counters=counters)


def counters_of(
    name: str = "halves",
    *,
    verify_s: float = 0.03,
    draft_s: float = 0.02,
    waited_s: float = 0.001,
) -> Counters:
    """Counters of ten passes over three requests; `draft_s` is the draft time of each."""
    counted: dict[str, float] = {"passes": 10, "requests": 30, "input_tokens": 150}
    counted |= {"seconds": 10 * verify_s, "waited_seconds": 10 * waited_s}
    pipelines = {name: counted, "queue": dict.fromkeys(counted, 0.0)}
    return Counters(pipelines, 100, 10 * draft_s, 50)


def round_of(number: int, names: Sequence[str]) -> dict[Cell, Run]:
    """A round of two groups; every configuration except `none` is twice as fast."""
    drafts: dict[str, Any] = {"passes": 4, "proposed": 10, "accepted": {"queue": 3, "output": 2}}
    found = {}
    for name in names:
        is_plain = name.startswith("none")
        one = answer(service=2.0) if is_plain else answer(**drafts)
        drafted = 40 if name.startswith("qspec") else None
        for group, answers in (("qa", (one, one)), ("rag", (one,))):
            cell = Cell.of(number, name, group=group, part=0)
            found[cell] = run(*answers, seconds=4.0 if is_plain else 2.0, drafted=drafted)
    return found
