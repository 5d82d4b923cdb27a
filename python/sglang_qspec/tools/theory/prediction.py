"""Predicts the throughput of target and draft model from measured agreement and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_qspec.config import QSpecConfig
from sglang_qspec.policy.acceptance import agreement
from sglang_qspec.policy.pipelines import fastest
from sglang_qspec.tools.measure.agreement import tokens_per_pass
from sglang_qspec.tools.measure.tables import APART, PairTimes, Slowdown

PAYS = 1.05
"""Predicted speedup from which drafting is recommended; the model's errors exceed a smaller one."""


@dataclass(frozen=True)
class Prediction:
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
        """The prediction as JSON."""
        return {**asdict(self), "speedup": self.speedup}


def best_pipeline(times: PairTimes, agreed: Sequence[Sequence[bool]], in_flight: int) -> Prediction:
    """The best pipeline and width for `in_flight` requests.

    `agreed` says for each answer and position whether the models agree. The slowdown counts in the
    pipelines in which both models run at once.
    """

    def rates(slowdown: Slowdown) -> dict[str, tuple[float, int]]:
        return fastest(
            lambda k: agreement(tokens_per_pass(agreed, k), k),
            times.passes.widths(in_flight),
            in_flight,
            lambda requests, width: slowdown.verify * times.passes(requests, width),
            lambda requests: slowdown.draft * times.step(requests),
            lookahead=QSpecConfig.step_tokens,
        )

    found = {"sequential": rates(APART)["sequential"]}
    if times.overlaps:
        found = rates(times.slowdown) | found
    pipeline = max(found, key=lambda name: found[name])
    rate, width = found[pipeline]
    return Prediction(in_flight, pipeline, width - 1, rate, in_flight / times.plain(in_flight))
