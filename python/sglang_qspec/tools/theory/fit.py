"""Fits the model to rows (measurements) of a benchmark, and predicts the other rows.

Only rows of `sequential` and `none` are fitted. In the other pipelines drafting and verifying
overlap; their rows are predicted, so their errors are errors of the model.
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
from sglang_qspec.tools.theory.rows import PLAIN, Row

FITTED = ("sequential", *PLAIN)
"""Pipelines with rows that are fitted."""


@dataclass(frozen=True)
class Fit:
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

    def estimate(self, row: Row) -> Estimate | None:
        """The prediction for a row; None for a pipeline that the model does not know.

        For `queue` it predicts only the time and takes the measured tokens per pass, because the
        two models do not determine how often the tries have a draft.
        """
        again = None
        if row.pipeline == "queue":
            if row.accept_len is None:
                return None
            again = 1.0
        found = estimates(
            self.alpha(row.k),
            row.k,
            row.in_flight,
            self.verify_seconds,
            lambda requests: self.draft_seconds(requests, row.k),
            lookahead=max(row.step_tokens, row.k) if row.step_tokens else None,
            again=again,
            overhead=self.overhead(row.in_flight),
        )
        if row.pipeline == "auto":
            return max((found[name] for name in PIPELINES), key=lambda estimate: estimate.rate)
        if row.pipeline == "queue" and row.accept_len is not None:
            return Estimate(row.in_flight, row.accept_len, found["queue"].seconds)
        return found.get("none" if row.pipeline in PLAIN else row.pipeline)


@dataclass(frozen=True)
class Comparison:
    """A measured row and its prediction."""

    row: Row
    estimate: Estimate

    @property
    def fitted(self) -> bool:
        """Whether the model was fitted to the row."""
        return self.row.pipeline in FITTED

    @property
    def error(self) -> float:
        """Relative error of the predicted throughput; above 0 if the prediction is too high."""
        return self.estimate.rate / self.row.tokens_per_s - 1.0


def compare(model: Fit, rows: Iterable[Row]) -> list[Comparison]:
    """Measurement and prediction of every row that the model can predict."""
    found = [(row, model.estimate(row)) for row in rows]
    return [Comparison(row, estimate) for row, estimate in found if estimate is not None]


def fit(rows: Sequence[Row]) -> Fit:
    """Fit alpha, V, D and the overhead of a round to the rows of `sequential` and `none`."""
    rounds = [found for row in rows if (found := _Round.of(row)) is not None]
    if not rounds:
        raise TheoryError(
            "no row of the pipeline 'sequential' has accept_len, verify_s and draft_s, "
            "so there is nothing to fit"
        )
    overhead = Curve.through(_medians((seen.b, seen.overhead) for seen in rounds).items())
    passes = [(seen.b, seen.k + 1, seen.verify) for seen in rounds]
    for row in rows:
        if row.pipeline in PLAIN:
            seconds = row.in_flight / row.tokens_per_s
            passes.append((row.in_flight, 1, max(seconds - overhead(row.in_flight), seconds / 2)))
    base, request = _line([(seen.b, seen.draft / seen.k) for seen in rounds])
    return Fit(
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
    """A row of `sequential` that has all fields that the fit needs."""

    b: int
    k: int
    rate: float
    tokens: float
    verify: float
    draft: float

    @staticmethod
    def of(row: Row) -> _Round | None:
        if row.pipeline != "sequential":
            return None
        if row.accept_len is None or row.verify_s is None or row.draft_s is None:
            return None
        return _Round(
            row.in_flight, row.k, row.tokens_per_s, row.accept_len, row.verify_s, row.draft_s
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
    weighted = [(1.0 / (y * y), x, y) for x, y in points]
    total = sum(w for w, _, _ in weighted)
    x_mean = sum(w * x for w, x, _ in weighted) / total
    y_mean = sum(w * y for w, _, y in weighted) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x, _ in weighted)
    if spread <= 1e-12 * total:  # one number of requests
        return y_mean, 0.0
    slope = max(0.0, sum(w * (x - x_mean) * (y - y_mean) for w, x, y in weighted) / spread)
    if slope * x_mean > y_mean:
        return 0.0, sum(w * x * y for w, x, y in weighted) / sum(w * x * x for w, x, _ in weighted)
    return y_mean - slope * x_mean, slope
