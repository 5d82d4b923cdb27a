"""Lists the targets of the pipelines, and decides whether a run meets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness.statistics import number
from benchmark.parallel.comparisons import Choice, Comparison, Comparisons, auto_speedups, balanced
from benchmark.parallel.measures import Results
from benchmark.parallel.plan import AHEAD, AUTO, HALVES

PAPER_RATIO, PAPER_OF_BOUND = 1.59, 0.97
SAME_OF_BOUND, SAME_RATIO, NEARLY_EQUAL = 0.85, 1.3, 2.0
HIDDEN_SHARE = 0.9
OF_BEST = 0.97
AUTO_SPEEDUPS = {2: 2.2, 4: 1.8, 8: 1.5}
"""Smallest ratio of `auto` over no speculation, by requests in flight."""


@dataclass(frozen=True)
class Target:
    """A goal, and the measured figures; `met` is None if the run did not measure them."""

    goal: str
    met: bool | None
    found: str
    """The measured figures, in words."""

    def record(self) -> dict[str, Any]:
        return {"goal": self.goal, "met": self.met, "found": self.found}

    @property
    def verdict(self) -> str:
        return {True: "met", False: "not met", None: "not measured"}[self.met]


def targets(results: Results, comparisons: Comparisons) -> list[Target]:
    """All targets, judged by the measurements."""
    # A single request has no halves, so these targets leave it out.
    several = [one for one in comparisons.best if one.in_flight > 1]
    nearly = [one for one in several if one.imbalance <= NEARLY_EQUAL]
    autos = [one for one in comparisons.choices if one.config == AUTO]
    return [
        _paper(comparisons),
        _all(
            "the better of halves and ahead over sequential, with the same requests in flight, at "
            f"every k: at least {SAME_OF_BOUND:.0%} of (V + D) / max(V, D)",
            [(o.of_bound >= SAME_OF_BOUND, f"{_cell(o)}: {_against_bound(o)}") for o in several],
        ),
        _all(
            f"the same, where V and D are within a factor of two: at least {SAME_RATIO}",
            [(o.ratio.median >= SAME_RATIO, f"{_cell(o)}: {o.ratio}, {_times(o)}") for o in nearly],
        ),
        _hidden(results),
        _all(
            f"auto over the best of the other pipelines: at least {OF_BEST} everywhere",
            [(c.ratio.median >= OF_BEST, f"{_place(c)}: {c.ratio} of {c.best}") for c in autos],
        ),
        *_speedups(results),
    ]


def _paper(comparisons: Comparisons) -> Target:
    goal = (
        f"halves with 2m in flight over sequential with m, where V and D are closest: at least "
        f"{PAPER_RATIO}, and at most 3 % under (V + D) / max(V, D)"
    )
    one = balanced(comparisons.paper)
    if one is None:
        return Target(goal, None, "")
    met = one.ratio.median >= PAPER_RATIO and one.of_bound >= PAPER_OF_BOUND
    return Target(goal, met, f"{_cell(one)}: {_against_bound(one)}, {_times(one)}")


def _hidden(results: Results) -> Target:
    found = []
    for row in results.rows():
        point, figures = row.point, row.figures
        if point.config not in (HALVES, AHEAD) or point.in_flight == 1 or not figures.verify_s:
            continue
        if figures.hidden_share is not None and figures.draft_s <= figures.verify_s:
            text = f"{point.config}, k = {point.k}, {row.running} in flight"
            share = figures.hidden_share
            found.append((share >= HIDDEN_SHARE, f"{text}: {share:.0%}"))
    goal = f"halves and ahead, where D is at most V: at least {HIDDEN_SHARE:.0%} of drafting hidden"
    return _all(goal, found)


def _speedups(results: Results) -> list[Target]:
    found = auto_speedups(results)
    targets = []
    for in_flight, least in AUTO_SPEEDUPS.items():
        goal = f"auto over no speculation, {in_flight} in flight: at least {least}"
        speedup, equal = found.get(in_flight, (None, None))
        text = number(speedup)
        if equal is not None:
            text += f", and {equal} if no speculation has the sidecar's cores as well"
        met = None if speedup is None else speedup.median >= least
        targets.append(Target(goal, met, "" if speedup is None else text))
    return targets


def _all(goal: str, found: Sequence[tuple[bool, str]]) -> Target:
    """A target that is met if all of `found` meet it; its text names those that miss it."""
    if not found:
        return Target(goal, None, "")
    missed = [text for met, text in found if not met]
    if missed:
        return Target(goal, False, f"{len(missed)} of {len(found)} are not: {'; '.join(missed)}")
    return Target(goal, True, f"all {len(found)} are")


def _cell(one: Comparison) -> str:
    return f"{one.pipeline}, {_place(one)}"


def _place(one: Comparison | Choice) -> str:
    return f"k = {one.k}, {one.in_flight} in flight"


def _against_bound(one: Comparison) -> str:
    return f"{one.ratio}, {one.of_bound:.0%} of {one.bound:.2f}"


def _times(one: Comparison) -> str:
    return f"V {one.verify_s * 1e3:.0f} ms, D {one.draft_s * 1e3:.0f} ms"
