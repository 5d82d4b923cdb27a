"""Fits the model to results of a benchmark, and predicts the other results.

Only results of `sequential` and `none` are fitted. In the other pipelines drafting and verifying
overlap; their results are predicted, so their errors are errors of the model.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_qspec.config import PIPELINES
from sglang_qspec.errors import TheoryError
from sglang_qspec.policy.acceptance import agreement
from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.pipelines import Estimate, estimates
from sglang_qspec.tools.theory.results import PLAIN, Result

FITTED = ("sequential", *PLAIN)
"""Pipelines with results that are fitted."""


@dataclass(frozen=True)
class FittedModel:
    """The fitted parameters of one machine with one target and one draft model."""

    alphas: Mapping[int, float]
    """Alpha by k."""
    verify_at: Mapping[int, Curve]
    """V in seconds by width, as a curve over the number of requests."""
    verify_rows: Curve
    """V in seconds over requests * width, for widths without measurements."""
    step_base: float
    """Constant part of a draft step in seconds."""
    step_request: float
    """Further seconds of a draft step for each request."""
    overhead: Curve
    """Seconds of a round besides verifying and drafting, over the number of requests."""

    def alpha(self, k: int) -> float:
        """Return alpha at k, or at the nearest measured k."""
        return self.alphas[min(self.alphas, key=lambda known: abs(known - k))]

    def verify_seconds(self, requests: int, width: int) -> float:
        """V(b, w) in seconds."""
        curve = self.verify_at.get(width)
        return curve(requests) if curve else self.verify_rows(requests * width)

    def draft_seconds(self, requests: int, k: int) -> float:
        """D(b) for k draft tokens, in seconds."""
        return k * (self.step_base + self.step_request * requests)

    def estimate(self, result: Result) -> Estimate | None:
        """The prediction for a result; None for a pipeline that the model does not know.

        For `queue` it predicts only the time and takes the measured tokens per pass, because the
        two models do not determine how often the tries have a draft.
        """
        k, pipeline = result.draft_tokens, result.pipeline
        again = None
        if pipeline == "queue":
            if not result.accept_len:
                return None
            again = 1.0
        found = estimates(
            self.alpha(k),
            k,
            result.in_flight,
            self.verify_seconds,
            lambda requests: self.draft_seconds(requests, k),
            lookahead=max(result.step_tokens, k) if result.step_tokens else None,
            again=again,
            overhead=self.overhead(result.in_flight),
        )
        if pipeline == "auto":
            return max((found[name] for name in PIPELINES), key=lambda estimate: estimate.rate)
        if pipeline == "queue" and result.accept_len:
            return Estimate(result.in_flight, result.accept_len, found["queue"].seconds)
        return found.get("none" if pipeline in PLAIN else pipeline)


@dataclass(frozen=True)
class PredictedResult:
    """A measured result and its prediction."""

    result: Result
    estimate: Estimate

    @property
    def fitted(self) -> bool:
        """Whether the model was fitted to the result."""
        return self.result.pipeline in FITTED

    @property
    def error(self) -> float:
        """Relative error of the predicted throughput; above 0 if the prediction is too high."""
        return self.estimate.rate / self.result.tokens_per_s - 1.0


def predict(model: FittedModel, results: Iterable[Result]) -> list[PredictedResult]:
    """Measurement and prediction of every result that the model can predict."""
    found = [(result, model.estimate(result)) for result in results]
    return [PredictedResult(result, estimate) for result, estimate in found if estimate is not None]


def fit(results: Sequence[Result]) -> FittedModel:
    """Fit alpha, V, D and the overhead of a round to the results of `sequential` and `none`."""
    rounds = [found for result in results if (found := _Round.of(result)) is not None]
    if not rounds:
        raise TheoryError(
            "no row of the pipeline 'sequential' has accept_len, verify_s and draft_s, "
            "so there is nothing to fit"
        )
    overhead = Curve.through(_medians((seen.b, seen.overhead) for seen in rounds).items())
    passes = [(seen.b, seen.k + 1, seen.verify) for seen in rounds]
    for result in results:
        if result.pipeline in PLAIN:
            b, seconds = result.in_flight, result.in_flight / result.tokens_per_s
            passes.append((b, 1, max(seconds - overhead(b), seconds / 2)))
    base, request = _line([(seen.b, seen.draft / seen.k) for seen in rounds])
    return FittedModel(
        alphas={
            k: agreement(tokens, k)
            for k, tokens in _medians((seen.k, seen.tokens) for seen in rounds).items()
        },
        verify_at={
            width: Curve.through(_medians((b, v) for b, w, v in passes if w == width).items())
            for width in {w for _, w, _ in passes}
        },
        verify_rows=Curve.through(_medians((b * w, v) for b, w, v in passes).items()),
        step_base=base,
        step_request=request,
        overhead=overhead,
    )


class _Round(NamedTuple):
    """A result of `sequential` that has all fields that the fit needs."""

    b: int
    k: int
    rate: float
    tokens: float
    verify: float
    draft: float

    @staticmethod
    def of(result: Result) -> _Round | None:
        if result.pipeline != "sequential":
            return None
        if not (result.accept_len and result.verify_s and result.draft_s):
            return None
        return _Round(
            result.in_flight,
            result.draft_tokens,
            result.tokens_per_s,
            result.accept_len,
            result.verify_s,
            result.draft_s,
        )

    @property
    def overhead(self) -> float:
        """Seconds of the round besides verifying and drafting, from its throughput."""
        return max(0.0, self.b * self.tokens / self.rate - self.verify - self.draft)


def _medians(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for place, value in pairs:
        groups[place].append(value)
    return {place: statistics.median(values) for place, values in groups.items()}


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Base and slope, neither below 0, with the least sum of squared relative errors."""
    from scipy.optimize import nnls  # only a fit needs it, and its import takes time

    # With one number of requests nothing tells the slope.
    slope = float(len({x for x, _ in points}) > 1)
    found, _ = nnls([[1 / y, slope * x / y] for x, y in points], [1.0] * len(points))
    return float(found[0]), float(found[1])
