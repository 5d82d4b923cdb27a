"""Pipelines against each other, and against the bound that hiding all drafting would reach.

With V and D the time to verify and to draft for the same requests, a round takes V + D in sequence
and max(V, D) at best, so no pipeline can be more than (V + D) / max(V, D) times as fast. Ratios are
of decoded tokens per second, without the time in which prompts are read, which no pipeline
changes; ratios of all tokens over all time stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmark.harness.statistics import Ratio, ratio_record, rounded
from benchmark.parallel.measures import DIGITS, Point, Results
from benchmark.parallel.plan import (
    AHEAD,
    AUTO,
    AUTO_STEP,
    HALVES,
    OTHERS,
    QUEUE,
    SEQUENTIAL,
    SEQUENTIAL_HALF,
)


@dataclass(frozen=True)
class Comparison:
    """A pipeline over drafting in sequence, with `k` draft tokens of a request in a pass."""

    k: int
    in_flight: int
    """Requests at once, of the pipeline."""
    pipeline: str
    ratio: Ratio
    """Ratio of decoded tokens per second."""
    whole_ratio: Ratio
    """Ratio of all tokens per second, with the time in which prompts are read."""
    verify_s: float
    """V of drafting in sequence, in seconds."""
    draft_s: float
    """D of drafting in sequence, in seconds."""

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
    """The server's own choice over the best of what it chooses from."""

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
    """All that the rounds allow, by requests in flight and k."""

    paper: tuple[Comparison, ...]
    """`halves` with 2m requests in flight over `sequential` with m."""
    same_in_flight: tuple[Comparison, ...]
    """`halves` and `ahead` over `sequential`, each with the same requests in flight."""
    choices: tuple[Choice, ...]

    @property
    def best(self) -> tuple[Comparison, ...]:
        """The better of `halves` and `ahead` where the requests in flight are the same."""
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
    paper, same, choices = [], [], []
    for in_flight in results.levels:
        for k in results.ks:
            halves, ahead, sequential, half = (
                Point(in_flight, k, name) for name in (HALVES, AHEAD, SEQUENTIAL, SEQUENTIAL_HALF)
            )
            paper.append(_over(results, halves, half))
            same += [_over(results, halves, sequential), _over(results, ahead, sequential)]
            choices += [_choice(results, Point(in_flight, k, name)) for name in (AUTO, AUTO_STEP)]
    return Comparisons(*(tuple(filter(None, found)) for found in (paper, same, choices)))


def balanced(comparisons: Iterable[Comparison]) -> Comparison | None:
    """The comparison with V and D closest to equal."""
    return min(comparisons, key=lambda one: one.imbalance, default=None)


def auto_speedups(results: Results) -> dict[int, tuple[Ratio, Ratio | None]]:
    """`auto` over no speculation by requests in flight: on its cores, and at equal hardware.

    Prompts are part of it. Of several k the largest counts, as `auto` verifies no more than pays.
    """
    points = (Point(level, k, AUTO) for level in results.levels for k in results.ks)
    rows = filter(None, map(results.row, points))
    return {row.running: (row.speedup, row.equal_hardware) for row in rows if row.speedup}


def _over(results: Results, point: Point, other: Point) -> Comparison | None:
    ratio, whole = results.decode_ratio(point, other), results.ratio(point, other)
    row = results.row(other)
    if ratio is None or whole is None or row is None:
        return None
    verify, draft = row.figures.verify_s, row.figures.draft_s
    if not verify or not draft:
        return None
    assert point.k is not None
    return Comparison(point.k, point.in_flight, point.config, ratio, whole, verify, draft)


def _choice(results: Results, point: Point) -> Choice | None:
    """Against the pipeline over which the ratio is the least."""
    found = []
    # Drafts made while requests wait are not among what `auto-step` may use.
    others = OTHERS if point.config == AUTO else [name for name in OTHERS if name != QUEUE]
    for name in others:
        other = Point(point.in_flight, point.k, name)
        ratio, whole = results.decode_ratio(point, other), results.ratio(point, other)
        if ratio is not None and whole is not None:
            assert point.k is not None
            found.append(Choice(point.k, point.in_flight, point.config, name, ratio, whole))
    return min(found, key=_ratio, default=None)


def _ratio(choice: Choice) -> float:
    return choice.ratio.median


def _record(found: Comparison | Choice) -> dict[str, Any]:
    """The fields for JSON, ratios with their spreads."""
    record: dict[str, Any] = {}
    for name, value in vars(found).items():
        record |= (
            ratio_record(name, value, DIGITS)
            if isinstance(value, Ratio)
            else {name: rounded(value, DIGITS)}
        )
    return record
