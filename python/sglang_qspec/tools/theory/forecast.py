"""Predicts the throughput of target and draft model from measured agreement and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sglang_qspec.config import QSpecConfig
from sglang_qspec.policy.acceptance import agreement
from sglang_qspec.policy.pipelines import fastest
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

    def rates(slower: Slowdown) -> dict[str, tuple[float, int]]:
        return fastest(
            lambda k: agreement(tokens_per_pass(agreed, k), k),
            passes.widths(in_flight),
            in_flight,
            lambda requests, width: slower.verify * passes(requests, width),
            lambda requests: slower.draft * step(requests),
            lookahead=QSpecConfig.step_tokens,
        )

    found = {"sequential": rates(APART)["sequential"]}
    if overlaps:
        found = rates(slowdown) | found
    pipeline = max(found, key=lambda name: found[name])
    rate, width = found[pipeline]
    return Forecast(in_flight, pipeline, width - 1, rate, in_flight / plain)
