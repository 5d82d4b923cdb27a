"""Predicts the throughput of target and draft model from measured agreement and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sglang_qspec.config import PIPELINES, QSpecConfig
from sglang_qspec.policy.acceptance import agreement
from sglang_qspec.policy.pipelines import estimates
from sglang_qspec.tools.measure.agreement import tokens_per_pass
from sglang_qspec.tools.measure.tables import PassSeconds

PAYS = 1.05
"""Predicted speedup from which drafting is recommended; the model's errors exceed a smaller one."""


class Slowdown(NamedTuple):
    """Time while target and draft model run at once, over the time while the other one is idle."""

    verify: float = 1.0
    """Of the target's passes."""
    draft: float = 1.0
    """Of draft steps."""


APART = Slowdown()
"""The models do not slow each other down."""


@dataclass(frozen=True)
class Forecast:
    """The best pipeline for one number of requests in flight, and what it yields."""

    in_flight: int
    pipeline: str
    draft_tokens: int
    """Number of draft tokens that a pass verifies for each request."""
    tokens_per_s: float
    plain_tokens_per_s: float
    """Tokens per second without a draft model, on all CPUs of both."""

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s

    def record(self) -> dict[str, Any]:
        """The forecast as JSON."""
        return {**asdict(self), "speedup": self.speedup}


def forecast(
    agreed: Sequence[Sequence[bool]],
    in_flight: int,
    plain: float,
    passes: PassSeconds,
    step: Callable[[float], float],
    *,
    overlaps: bool = True,
    slowdown: Slowdown = APART,
) -> Forecast:
    """The best pipeline and width for `in_flight` requests.

    `plain` are the seconds of a decode pass without a draft model, and `passes` those beside one.
    `step` gives the seconds of a draft step by the number of requests. Unless target and draft
    model `overlaps`, they take turns in every pipeline. `slowdown` counts in the pipelines in which
    both run at once.
    """

    def rate(pipeline: str, k: int) -> float:
        slower = APART if pipeline == "sequential" else slowdown
        return estimates(
            agreement(tokens_per_pass(agreed, k), k),
            k,
            in_flight,
            lambda requests, width: slower.verify * passes(requests, width),
            lambda requests: slower.draft * k * step(requests),
            lookahead=max(k, QSpecConfig.step_tokens),
        )[pipeline].rate

    found = [
        (rate(pipeline, width - 1), pipeline, width - 1)
        for width in passes.widths(in_flight)
        for pipeline in (PIPELINES if overlaps else ("sequential",))
    ]
    best, pipeline, k = max(found)
    return Forecast(in_flight, pipeline, k, best, in_flight / plain)
