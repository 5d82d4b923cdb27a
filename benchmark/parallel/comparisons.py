"""Compares pipelines with each other, and with the bound with all drafting hidden.

V and D are the times to verify and to draft for the same requests. A round takes V + D in sequence
and max(V, D) at best, so no pipeline is more than (V + D) / max(V, D) times as fast. Ratios are of
decoded tokens per second without the prefill time, which no pipeline changes. Each comparison also
has a ratio of all tokens over all time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmark.harness.statistics import Ratio, ratio_record, rounded
from benchmark.harness.summary import DIGITS
from benchmark.parallel import plan
from benchmark.parallel.measures import Results, running


@dataclass(frozen=True)
class Comparison:
    """A pipeline over `sequential`, with `k` draft tokens of a request in a pass."""

    k: int
    in_flight: int
    """Requests in flight of the pipeline."""
    pipeline: str
    ratio: Ratio
    """Ratio of decoded tokens per second."""
    whole_ratio: Ratio
    """Ratio of all tokens per second, with the prefill time."""
    verify_s: float
    """V of `sequential`, in seconds."""
    draft_s: float
    """D of `sequential`, in seconds."""

    @property
    def bound(self) -> float:
        return (self.verify_s + self.draft_s) / max(self.verify_s, self.draft_s)

    @property
    def of_bound(self) -> float:
        return self.ratio.median / self.bound

    @property
    def imbalance(self) -> float:
        """The longer of V and D over the shorter."""
        short, long = sorted((self.verify_s, self.draft_s))
        return long / short if short > 0 else math.inf

    def record(self) -> dict[str, Any]:
        """For JSON."""
        bound = {"bound": self.bound, "of_bound": self.of_bound}
        return {**_record(self), **rounded(bound, DIGITS)}


@dataclass(frozen=True)
class Choice:
    """The server's own choice of a pipeline over the best of the pipelines."""

    k: int
    in_flight: int
    config: str
    """`auto` or `auto-step`."""
    best: str
    ratio: Ratio
    whole_ratio: Ratio

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return _record(self)


@dataclass(frozen=True)
class Comparisons:
    """All comparisons, by requests in flight and k."""

    paper: tuple[Comparison, ...]
    """`halves` with 2m requests in flight over `sequential` with m."""
    same_in_flight: tuple[Comparison, ...]
    """`halves` and `ahead` over `sequential`, each with the same requests in flight."""
    choices: tuple[Choice, ...]

    @property
    def best(self) -> tuple[Comparison, ...]:
        """The better of `halves` and `ahead` with the same requests in flight."""
        found: dict[tuple[int, int], Comparison] = {}
        for one in self.same_in_flight:
            key = (one.in_flight, one.k)
            if key not in found or one.ratio.median > found[key].ratio.median:
                found[key] = one
        return tuple(found.values())

    def worst_choice(self, config: str) -> Choice | None:
        return min((c for c in self.choices if c.config == config), key=_ratio, default=None)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "paper": [one.record() for one in self.paper],
            "same_in_flight": [one.record() for one in self.same_in_flight],
            "auto": [one.record() for one in self.choices],
        }


def compare(results: Results) -> Comparisons:
    """All comparisons of the cells that were served."""
    paper: list[Comparison | None] = []
    same: list[Comparison | None] = []
    choices: list[Choice | None] = []
    for in_flight in results.levels:
        for k in results.ks:
            paper.append(_over(results, in_flight, k, plan.HALVES, plan.SEQUENTIAL_HALF))
            same += [
                _over(results, in_flight, k, name, plan.SEQUENTIAL)
                for name in (plan.HALVES, plan.AHEAD)
            ]
            autos = (plan.AUTO, plan.AUTO_STEP)
            choices += [_choice(results, in_flight, k, name) for name in autos]
    some = filter(None, paper), filter(None, same), filter(None, choices)
    return Comparisons(tuple(some[0]), tuple(some[1]), tuple(some[2]))


def balanced(comparisons: Iterable[Comparison]) -> Comparison | None:
    """The comparison with V and D closest to equal."""
    return min(comparisons, key=lambda one: one.imbalance, default=None)


def auto_speedups(results: Results) -> dict[int, tuple[Ratio, Ratio | None]]:
    """`auto` over no speculation on its cores and at equal hardware, by requests in flight.

    The ratios include the prefill time. If `auto` was served with several k, the largest k counts,
    because `auto` verifies only drafts that pay.
    """
    return {
        running(row): (speedup, results.equal_hardware(row))
        for row in results.rows
        if row.config == plan.AUTO and (speedup := results.speedup(row))
    }


def _over(
    results: Results, in_flight: int, k: int, pipeline: str, sequential: str
) -> Comparison | None:
    load = {"in_flight": in_flight, "k": k}
    ratio = results.decode_ratio(pipeline, sequential, load)
    whole = results.ratio(pipeline, sequential, load)
    row = results.row(sequential, load)
    if ratio is None or whole is None or row is None:
        return None
    verify, draft = row.figures.verify_s, row.figures.draft_s
    if not verify or not draft:
        return None
    return Comparison(k, in_flight, pipeline, ratio, whole, verify, draft)


def _choice(results: Results, in_flight: int, k: int, config: str) -> Choice | None:
    """The choice of the server, compared with the pipeline that gives the smallest ratio."""
    found = []
    load = {"in_flight": in_flight, "k": k}
    # `auto-step` may not use queue drafts.
    excluded = None if config == plan.AUTO else plan.QUEUE
    for name in (name for name in plan.OTHERS if name != excluded):
        ratio, whole = results.decode_ratio(config, name, load), results.ratio(config, name, load)
        if ratio is not None and whole is not None:
            found.append(Choice(k, in_flight, config, name, ratio, whole))
    return min(found, key=_ratio, default=None)


def _ratio(choice: Choice) -> float:
    return choice.ratio.median


def _record(found: Comparison | Choice) -> dict[str, Any]:
    """The fields for JSON, ratios with their spreads."""
    record: dict[str, Any] = {}
    for name, value in vars(found).items():
        is_ratio = isinstance(value, Ratio)
        record |= ratio_record(name, value, DIGITS) if is_ratio else {name: rounded(value, DIGITS)}
    return record
