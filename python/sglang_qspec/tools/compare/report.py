"""The tables, the recommendation and the JSON of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_qspec.tools.measure.agreement import share, tokens_per_pass
from sglang_qspec.tools.measure.tables import PassSeconds
from sglang_qspec.tools.table import aligned
from sglang_qspec.tools.theory.forecast import PAYS, Forecast

MIB = 1 << 20


@dataclass(frozen=True)
class TargetTimes:
    """Seconds of the target's passes."""

    plain: Mapping[int, float]
    """Of a decode pass without a draft model, by the number of requests."""
    beside: PassSeconds
    """Of passes beside a draft model."""


@dataclass(frozen=True)
class Candidate:
    """The figures of one draft model."""

    name: str
    """A short name for tables."""
    path: str
    """As the user gave it."""
    greedy: list[list[bool]]
    """Agreement with the greedy answers by answer and position."""
    sampled: list[list[bool]]
    """The same for the sampled answers."""
    step_seconds: dict[int, float]
    """Seconds of a draft step by the number of requests."""
    weight_bytes: int | None
    """Size of the weight files; None for a model on a hub."""
    memory_bytes: int
    dtype: str
    quantization: str | None
    forecasts: list[Forecast]
    """For greedy requests, one for each number in flight."""
    sampled_forecasts: list[Forecast]
    """For sampled requests."""

    def record(self, k: int) -> dict[str, Any]:
        """The figures as JSON; accept lengths are those of passes over `k` draft tokens."""
        return {
            "draft": self.path,
            "greedy_agreement": share(self.greedy),
            "sampled_agreement": share(self.sampled),
            "greedy_accepted_run": tokens_per_pass(self.greedy, k) - 1,
            "sampled_accepted_run": tokens_per_pass(self.sampled, k) - 1,
            "run_of": k,
            "step_ms": {str(b): 1e3 * each for b, each in self.step_seconds.items()},
            "weight_bytes": self.weight_bytes,
            "memory_bytes": self.memory_bytes,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "predicted": [each.record() for each in self.forecasts],
            "predicted_sampled": [each.record() for each in self.sampled_forecasts],
        }


def text_of(candidates: Sequence[Candidate], times: TargetTimes, heading: str) -> str:
    """The comparison as text."""
    parts = [heading, _passes(times), _figures(candidates, times), _forecasts(candidates)]
    return "\n\n".join([*parts, recommendation(candidates)])


def recommendation(candidates: Sequence[Candidate]) -> str:
    """One sentence: the draft model to take for greedy requests, or that none pays."""
    count = len(candidates[0].forecasts)
    best = [max(candidates, key=lambda each: each.forecasts[i].speedup) for i in range(count)]
    found = [candidate.forecasts[i] for i, candidate in enumerate(best)]
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


def _passes(times: TargetTimes) -> str:
    widths = sorted({width for _, width in times.beside.measured})
    head = ("target's passes, ms", "no draft model", *(f"width {width}" for width in widths))
    rows = [
        (
            f"{requests} in flight",
            _ms(seconds),
            *(_ms(times.beside.measured[requests, width]) for width in widths),
        )
        for requests, seconds in times.plain.items()
    ]
    return aligned([head, *rows])


def _figures(candidates: Sequence[Candidate], times: TargetTimes) -> str:
    k = times.beside.widest - 1
    head = (
        "draft model",
        "agrees, greedy",
        "sampled",
        f"accepted of {k}",
        "sampled",
        *(f"step ms, {requests}" for requests in times.plain),
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
            *(_ms(each.step_seconds[requests]) for requests in times.plain),
            "" if each.weight_bytes is None else f"{each.weight_bytes / MIB:.0f}",
            f"{each.memory_bytes / MIB:.0f}",
        )
        for each in candidates
    ]
    return aligned([head, *rows])


def _forecasts(candidates: Sequence[Candidate]) -> str:
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
        for greedy, sampled in zip(candidate.forecasts, candidate.sampled_forecasts, strict=True)
    ]
    return aligned([(*head, "sampled tok/s", "x none", "best as"), *rows])


def _predicted(found: Forecast) -> tuple[str, str, str]:
    return (
        f"{found.tokens_per_s:.1f}",
        f"{found.speedup:.2f}",
        f"{found.pipeline}, k={found.draft_tokens}",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
