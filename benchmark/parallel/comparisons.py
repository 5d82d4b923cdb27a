"""Pipelines against each other, and against what hiding the drafting could give at most.

With V and D the time to verify and to draft for the same requests, a round takes V + D in sequence
and max(V, D) at best, so no pipeline can be more than (V + D) / max(V, D) times as fast. Ratios are
of decoded tokens per second, without the time in which prompts are read, which no pipeline
changes; those of all tokens over all the time are given beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from benchmark.parallel.measures import Cell, Results, rounded
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
    ratio: float
    whole_ratio: float
    """With the time in which prompts are read."""
    verify_s: float
    """V and D, of drafting in sequence, in seconds."""
    draft_s: float

    @property
    def bound(self) -> float:
        return (self.verify_s + self.draft_s) / max(self.verify_s, self.draft_s)

    @property
    def of_bound(self) -> float:
        return self.ratio / self.bound

    @property
    def imbalance(self) -> float:
        """The longer of V and D over the shorter."""
        short, long = sorted((self.verify_s, self.draft_s))
        return long / short if short > 0 else math.inf

    def record(self) -> dict[str, Any]:
        """For JSON."""
        shown = {**asdict(self), "bound": self.bound, "of_bound": self.of_bound}
        return {n: rounded(v) if isinstance(v, float) else v for n, v in shown.items()}


@dataclass(frozen=True)
class Choice:
    """The server's own choice over the best of what it chooses from."""

    k: int
    in_flight: int
    config: str
    """`auto` or `auto-step`."""
    best: str
    ratio: float
    whole_ratio: float

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {n: rounded(v) if isinstance(v, float) else v for n, v in asdict(self).items()}


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
            if key not in found or one.ratio > found[key].ratio:
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
                Cell(in_flight, k, name) for name in (HALVES, AHEAD, SEQUENTIAL, SEQUENTIAL_HALF)
            )
            paper.append(_over(results, halves, half))
            same += [_over(results, halves, sequential), _over(results, ahead, sequential)]
            choices += [_choice(results, Cell(in_flight, k, name)) for name in (AUTO, AUTO_STEP)]
    return Comparisons(_known(paper), _known(same), _known(choices))


def balanced(comparisons: Iterable[Comparison]) -> Comparison | None:
    """The one whose V and D are closest to equal."""
    return min(comparisons, key=lambda one: one.imbalance, default=None)


def auto_speedups(results: Results) -> dict[int, tuple[float, float | None]]:
    """`auto` over no speculation by requests in flight: on its cores, and at equal hardware.

    Prompts are part of it. Of several k the largest counts, as `auto` verifies no more than pays.
    """
    found = {}
    for in_flight in results.levels:
        for k in reversed(results.ks):
            row = results.row(Cell(in_flight, k, AUTO))
            if row is not None and row.speedup is not None:
                found[in_flight] = (row.speedup, row.equal_hardware)
                break
    return found


def _over(results: Results, cell: Cell, other: Cell) -> Comparison | None:
    ratio, whole = results.decode_ratio(cell, other), results.ratio(cell, other)
    row = results.row(other)
    if ratio is None or whole is None or row is None:
        return None
    verify, draft = row.figures.verify_s, row.figures.draft_s
    if not verify or not draft:
        return None
    assert cell.k is not None
    return Comparison(cell.k, cell.in_flight, cell.config, ratio, whole, verify, draft)


def _choice(results: Results, cell: Cell) -> Choice | None:
    """Against the other of which the choice is the smallest multiple."""
    found = []
    # Drafts made while requests wait are not among what `auto-step` may use.
    others = OTHERS if cell.config == AUTO else [name for name in OTHERS if name != QUEUE]
    for name in others:
        other = Cell(cell.in_flight, cell.k, name)
        ratio, whole = results.decode_ratio(cell, other), results.ratio(cell, other)
        if ratio is not None and whole is not None:
            assert cell.k is not None
            found.append(Choice(cell.k, cell.in_flight, cell.config, name, ratio, whole))
    return min(found, key=_ratio, default=None)


def _ratio(choice: Choice) -> float:
    return choice.ratio


Found = TypeVar("Found")


def _known(items: Iterable[Found | None]) -> tuple[Found, ...]:
    return tuple(item for item in items if item is not None)
