"""Predicts the throughput of target and draft model from measured agreement and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sglang_qspec.compare.agreement import tokens_per_pass
from sglang_qspec.config import PIPELINES, QSpecConfig
from sglang_qspec.theory import Curve, agreement, estimates

PAYS = 1.05
"""Predicted speedup from which drafting is recommended; the model's errors exceed a smaller one."""


@dataclass(frozen=True)
class PassSeconds:
    """Measured seconds of the target's passes."""

    plain: Mapping[int, float]
    """Seconds of a plain decode pass without a draft model, by the number of requests."""
    verify: Mapping[tuple[int, int], float]
    """Seconds of a pass beside a draft model, by the number of requests and the width."""

    @property
    def widths(self) -> list[int]:
        return sorted({width for _, width in self.verify if width > 1})

    def at(self, requests: int, width: int) -> float:
        """Seconds of a pass; between measured numbers of requests they are interpolated."""
        points = [(b, seconds) for (b, w), seconds in self.verify.items() if w == width]
        return Curve.through(points)(requests)


@dataclass(frozen=True)
class Forecast:
    """The best pipeline for one number of requests in flight, and what it yields."""

    requests: int
    pipeline: str
    k: int
    """Number of draft tokens that a pass verifies for each request."""
    tokens_per_s: float
    none_tokens_per_s: float
    """Tokens per second without a draft model, on all CPUs of both."""

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.none_tokens_per_s


def forecast(
    agreed: Sequence[Sequence[bool]],
    requests: int,
    passes: PassSeconds,
    step: Callable[[float], float],
    *,
    overlaps: bool,
) -> Forecast:
    """The best pipeline and width for `requests` in flight.

    `step` gives the seconds of a draft step by the number of requests. Unless target and draft
    model `overlaps`, they take turns in every pipeline.
    """
    found = []
    for width in passes.widths:
        k = width - 1
        alpha = agreement(tokens_per_pass(agreed, k), k)
        rates = estimates(
            alpha,
            k,
            requests,
            passes.at,
            partial(_draft_seconds, step, k),
            lookahead=max(k, QSpecConfig.step_tokens),
        )
        names = PIPELINES if overlaps else PIPELINES[:1]
        found += [(rates[name].rate, name, k) for name in names]
    rate, pipeline, k = max(found)
    return Forecast(requests, pipeline, k, rate, requests / passes.plain[requests])


def _draft_seconds(step: Callable[[float], float], k: int, requests: int) -> float:
    """Seconds in which `k` draft tokens of each request are drafted."""
    return k * step(requests)
