"""What the probe's records say: the time that QSPEC adds to a scheduler iteration."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness.statistics import percentile


@dataclass(frozen=True)
class Iteration:
    """One scheduler iteration with a batch that decodes. Times are in milliseconds."""

    running: int
    width: int
    """Tokens that the pass verified for each request; 1 is a plain decode pass."""
    period: float
    """From this iteration's batch to the next one's."""
    worker: float
    """The worker's call: the target's pass, and all that the worker does before and after it."""
    model: float
    """The target model's forward pass in it."""
    hooks: dict[str, float]
    """QSPEC's hooks in the scheduler, outside the worker."""
    parts: dict[str, float]
    """Parts of the worker's call besides the model."""

    @property
    def waited(self) -> float:
        """For drafts that are worth it; no work, and as with the model it is what tokens cost."""
        return self.parts.get("wait", 0.0)

    @property
    def around_model(self) -> float:
        """The worker's call without the model: sampling included, also in a plain decode pass."""
        return self.worker - self.model - self.waited

    @property
    def ours(self) -> float:
        """All of an iteration that is in QSPEC's hands: `around_model`, and the hooks."""
        return self.around_model + sum(self.hooks.values())

    @property
    def outside_model(self) -> float:
        """The iteration without the model: the scheduler's own work too."""
        return self.period - self.model - self.waited


def read(lines: Iterable[str]) -> list[Iteration]:
    """The probe's lines; iterations that do not decode, such as prefill, are left out."""
    rows = (json.loads(line) for line in lines)
    return [_iteration(row) for row in rows if row["decode"]]


def _iteration(row: dict[str, Any]) -> Iteration:
    return Iteration(
        running=row["running"],
        width=row["width"],
        period=row["period"] / 1e6,
        worker=row["worker"] / 1e6,
        model=row["model"] / 1e6,
        hooks={name: time / 1e6 for name, time in row["hooks"].items()},
        parts={name: time / 1e6 for name, time in row["parts"].items()},
    )


@dataclass(frozen=True)
class PlainDecode:
    """A server without speculation at some number of running requests. Medians, milliseconds."""

    iterations: int
    step: float
    """A decode step: the worker's call, sampling included."""
    around_model: float
    outside_model: float


@dataclass(frozen=True)
class Added:
    """What QSPEC adds to an iteration, against plain decoding. Milliseconds."""

    iterations: int
    width: float
    """Mean of the iterations."""
    median: float
    p99: float
    whole: float
    """The same median over whole iterations: with what the scheduler does for longer outputs."""
    parts: dict[str, float]
    """Mean time of each part, largest first; `other` is what no part accounts for. They add up to
    the mean of what is in QSPEC's hands, and so contain what a plain decode step spends too."""


def plain_decode(iterations: Sequence[Iteration]) -> PlainDecode:
    """Raises ValueError without iterations."""
    _check(iterations)
    return PlainDecode(
        len(iterations),
        statistics.median(iteration.worker for iteration in iterations),
        statistics.median(iteration.around_model for iteration in iterations),
        statistics.median(iteration.outside_model for iteration in iterations),
    )


def added(iterations: Sequence[Iteration], plain: PlainDecode) -> Added:
    """What iterations with QSPEC take more than those of `plain`. Raises ValueError without any."""
    _check(iterations)
    ours = [iteration.ours for iteration in iterations]
    whole = statistics.median(iteration.outside_model for iteration in iterations)
    return Added(
        len(iterations),
        statistics.mean(iteration.width for iteration in iterations),
        statistics.median(ours) - plain.around_model,
        percentile(ours, 0.99) - plain.around_model,
        whole - plain.outside_model,
        _parts(iterations),
    )


def _parts(iterations: Sequence[Iteration]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for iteration in iterations:
        rest = iteration.around_model + iteration.waited - sum(iteration.parts.values())
        hooks = {f"hook: {name}": time for name, time in iteration.hooks.items()}
        for name, time in (*iteration.parts.items(), *hooks.items(), ("other", rest)):
            totals[name] = totals.get(name, 0.0) + time
    means = {name: total / len(iterations) for name, total in totals.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _check(iterations: Sequence[Iteration]) -> None:
    if not iterations:
        raise ValueError("there is no iteration to measure")
