"""Computes the time that QSPEC adds to a scheduler iteration, from the probe's records."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmark.harness.statistics import percentile


@dataclass(frozen=True)
class Iteration:
    """One scheduler iteration with a batch that decodes. Times are in milliseconds."""

    running: int
    width: int
    """Tokens that the pass verified for each request; 1 is a plain decode pass."""
    period: float
    """Time from this iteration's batch to the next one's."""
    worker: float
    """The worker's call: the target's pass, and the worker's work before and after it."""
    model: float
    """The target model's forward pass in the worker's call."""
    hooks: dict[str, float]
    """Times of QSPEC's hooks in the scheduler, outside the worker, by the name of the hook."""
    parts: dict[str, float]
    """Times of the parts of the worker's call besides the model, by the name of the part."""

    @property
    def waited(self) -> float:
        """The wait for drafts; like the model's time, it does not count as QSPEC's work."""
        return self.parts.get("wait", 0.0)

    @property
    def around_model(self) -> float:
        """The worker's call without the model, but with sampling, as in a plain decode pass."""
        return self.worker - self.model - self.waited

    @property
    def ours(self) -> float:
        """The part of an iteration that belongs to QSPEC: `around_model` and the hooks."""
        return self.around_model + sum(self.hooks.values())

    @property
    def outside_model(self) -> float:
        """The iteration without model and wait; it includes the scheduler's own work."""
        return self.period - self.model - self.waited


def read(lines: Iterable[str]) -> list[Iteration]:
    """The decode iterations in the probe's lines."""
    rows = (json.loads(line) for line in lines)
    return [Iteration(**row) for row in rows if row.pop("decode")]


@dataclass(frozen=True)
class PlainDecode:
    """A server without speculation at some number of running requests. Times are medians."""

    iterations: int
    step_ms: float
    """A decode step: the worker's call, sampling included."""
    around_model_ms: float
    outside_model_ms: float


@dataclass(frozen=True)
class Added:
    """The time that QSPEC adds to an iteration, against plain decoding."""

    iterations: int
    width: float
    """Mean width of the iterations' passes, in tokens of a request."""
    added_ms_median: float
    added_ms_p99: float
    added_share: float
    """The median over the time of a plain decode step."""
    whole_ms_median: float
    """Median of whole iterations, with the scheduler's own work for several tokens per request."""
    parts_ms: dict[str, float]
    """Mean time of each part, largest first; `other` is the rest. The parts add up to the mean of
    `ours` plus the waits, so they include the time of a plain decode step."""


def plain_decode(iterations: Sequence[Iteration]) -> PlainDecode:
    """The medians of plain decode iterations. Raises ValueError without iterations."""
    _check(iterations)
    names = ("worker", "around_model", "outside_model")
    found = (statistics.median(getattr(i, name) for i in iterations) for name in names)
    return PlainDecode(len(iterations), *found)


def added(iterations: Sequence[Iteration], plain: PlainDecode) -> Added:
    """The extra time of QSPEC's iterations over `plain`. Raises ValueError without iterations."""
    _check(iterations)
    ours = [iteration.ours for iteration in iterations]
    whole = statistics.median(iteration.outside_model for iteration in iterations)
    median = statistics.median(ours) - plain.around_model_ms
    return Added(
        len(iterations),
        statistics.mean(iteration.width for iteration in iterations),
        median,
        percentile(ours, 0.99) - plain.around_model_ms,
        median / plain.step_ms,
        whole - plain.outside_model_ms,
        _parts(iterations),
    )


def _parts(iterations: Sequence[Iteration]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for one in iterations:
        hooks = {f"hook: {name}": time for name, time in one.hooks.items()}
        for name, time in (one.parts | hooks).items():
            totals[name] += time
        totals["other"] += one.around_model + one.waited - sum(one.parts.values())
    largest = sorted(totals, key=totals.__getitem__, reverse=True)
    return {name: totals[name] / len(iterations) for name in largest}


def _check(iterations: Sequence[Iteration]) -> None:
    if not iterations:
        raise ValueError("the probe recorded no iteration with this number of requests")
