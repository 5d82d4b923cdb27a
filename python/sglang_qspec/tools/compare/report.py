"""The tables, the recommendation and the JSON of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_qspec.tools.measure.agreement import share, tokens_per_pass
from sglang_qspec.tools.measure.tables import PairTimes
from sglang_qspec.tools.table import aligned
from sglang_qspec.tools.theory.prediction import PAYS, Prediction

MIB = 1 << 20


@dataclass(frozen=True)
class DraftFigures:
    """The figures of one draft model."""

    name: str
    """A short name for tables."""
    path: str
    """As the user gave it."""
    times: PairTimes
    greedy: list[list[bool]]
    """Agreement with the greedy answers by answer and position."""
    sampled: list[list[bool]]
    """The same for the sampled answers."""
    weight_bytes: int | None
    """Size of the weight files; None for a model on a hub."""
    memory_bytes: int
    dtype: str
    quantization: str | None
    predicted: list[Prediction]
    """For greedy requests, one for each number in flight."""
    predicted_sampled: list[Prediction]
    """For sampled requests."""

    @property
    def in_flight(self) -> list[int]:
        """Numbers of requests in flight."""
        return [each.in_flight for each in self.predicted]

    def record(self) -> dict[str, Any]:
        """The figures as JSON; accept lengths are those of the widest pass."""
        k = self.times.passes.widest - 1
        return {
            "draft": self.path,
            "greedy_agreement": share(self.greedy),
            "sampled_agreement": share(self.sampled),
            "greedy_accepted_run": tokens_per_pass(self.greedy, k) - 1,
            "sampled_accepted_run": tokens_per_pass(self.sampled, k) - 1,
            "run_of": k,
            "step_ms": {str(b): 1e3 * self.times.step(b) for b in self.in_flight},
            "weight_bytes": self.weight_bytes,
            "memory_bytes": self.memory_bytes,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "predicted": [each.record() for each in self.predicted],
            "predicted_sampled": [each.record() for each in self.predicted_sampled],
        }


def text_of(candidates: Sequence[DraftFigures], heading: str) -> str:
    """The comparison as text."""
    parts = [heading, _passes(candidates[0]), _figures(candidates), _predictions(candidates)]
    return "\n\n".join([*parts, recommendation(candidates)])


def recommendation(candidates: Sequence[DraftFigures]) -> str:
    """One sentence: the draft model to take for greedy requests, or that none pays."""
    count = len(candidates[0].in_flight)
    best = [max(candidates, key=lambda each: each.predicted[i].speedup) for i in range(count)]
    found = [candidate.predicted[i] for i, candidate in enumerate(best)]
    if all(each.speedup < PAYS for each in found):
        highest = max(each.speedup for each in found)
        return (
            "Recommendation: none of the draft models pays on this machine; the best is predicted "
            f"to make {highest:.2f} times the tokens/s of no speculation."
        )
    clauses: dict[str, list[str]] = {}
    for candidate, each in zip(best, found, strict=True):
        name = candidate.name if each.speedup >= PAYS else "no draft model"
        figure = f"{each.speedup:.2f} times no speculation"
        clauses.setdefault(name, []).append(f"{each.in_flight} in flight (predicted {figure})")
    parts = [f"{name} with {' and '.join(loads)}" for name, loads in clauses.items()]
    return f"Recommendation: take {', and '.join(parts)}."


def _passes(candidate: DraftFigures) -> str:
    """The target's passes, which are those of any candidate."""
    times = candidate.times
    widths = sorted({width for _, width in times.passes.measured})
    head = ("target's passes, ms", "no draft model", *(f"width {width}" for width in widths))
    rows = [
        (
            f"{requests} in flight",
            _ms(times.plain(requests)),
            *(_ms(times.passes.measured[requests, width]) for width in widths),
        )
        for requests in candidate.in_flight
    ]
    return aligned([head, *rows])


def _figures(candidates: Sequence[DraftFigures]) -> str:
    k = candidates[0].times.passes.widest - 1
    head = (
        "draft model",
        "agrees, greedy",
        "sampled",
        f"accepted of {k}",
        "sampled",
        *(f"step ms, {requests}" for requests in candidates[0].in_flight),
        "weights MiB",
        "memory MiB",
    )
    rows = [
        (
            each.name,
            f"{100 * share(each.greedy):.1f} %",
            f"{100 * share(each.sampled):.1f} %",
            f"{tokens_per_pass(each.greedy, k) - 1:.2f}",
            f"{tokens_per_pass(each.sampled, k) - 1:.2f}",
            *(_ms(each.times.step(requests)) for requests in each.in_flight),
            "" if each.weight_bytes is None else f"{each.weight_bytes / MIB:.0f}",
            f"{each.memory_bytes / MIB:.0f}",
        )
        for each in candidates
    ]
    return aligned([head, *rows])


def _predictions(candidates: Sequence[DraftFigures]) -> str:
    head = ("predicted", "in flight", "none tok/s", "greedy tok/s", "x none", "best as")
    rows = [
        (
            candidate.name,
            str(greedy.in_flight),
            f"{greedy.plain_tokens_per_s:.1f}",
            *_predicted(greedy),
            *_predicted(sampled),
        )
        for candidate in candidates
        for greedy, sampled in zip(candidate.predicted, candidate.predicted_sampled, strict=True)
    ]
    return aligned([(*head, "sampled tok/s", "x none", "best as"), *rows])


def _predicted(found: Prediction) -> tuple[str, str, str]:
    return (
        f"{found.tokens_per_s:.1f}",
        f"{found.speedup:.2f}",
        f"{found.pipeline}, k={found.draft_tokens}",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
