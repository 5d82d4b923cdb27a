"""What the pipelines are to reach, and whether they do, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.parallel.comparisons import Comparison, Comparisons, auto_speedups, balanced
from benchmark.parallel.measures import Results
from benchmark.parallel.plan import AHEAD, AUTO, HALVES

PAPER_RATIO, PAPER_OF_BOUND = 1.59, 0.97
SAME_OF_BOUND, SAME_RATIO, NEARLY_EQUAL = 0.85, 1.3, 2.0
HIDDEN_SHARE = 0.9
OF_BEST = 0.97
AUTO_SPEEDUPS = {2: 2.2, 4: 1.8, 8: 1.5}
"""Over no speculation, by requests in flight."""


@dataclass(frozen=True)
class Target:
    """`met` is None if nothing was measured that would tell."""

    goal: str
    met: bool | None
    found: str
    """What was measured, in words."""

    def record(self) -> dict[str, Any]:
        return {"goal": self.goal, "met": self.met, "found": self.found}

    @property
    def verdict(self) -> str:
        return {True: "met", False: "not met", None: "not measured"}[self.met]


def targets(results: Results, comparisons: Comparisons) -> list[Target]:
    return [
        _paper(comparisons),
        _of_bound(comparisons),
        _nearly_equal(comparisons),
        _hidden(results),
        _choice(comparisons),
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


def _of_bound(comparisons: Comparisons) -> Target:
    goal = (
        f"the better of halves and ahead over sequential, with the same requests in flight, at "
        f"every k: at least {SAME_OF_BOUND:.0%} of (V + D) / max(V, D)"
    )
    found = _several(comparisons)
    return _all(
        goal,
        [(one.of_bound >= SAME_OF_BOUND, f"{_cell(one)}: {_against_bound(one)}") for one in found],
    )


def _nearly_equal(comparisons: Comparisons) -> Target:
    goal = f"the same, where V and D are within a factor of two: at least {SAME_RATIO}"
    found = [one for one in _several(comparisons) if one.imbalance <= NEARLY_EQUAL]
    return _all(
        goal,
        [(o.ratio.median >= SAME_RATIO, f"{_cell(o)}: {o.ratio} ({_times(o)})") for o in found],
    )


def _several(comparisons: Comparisons) -> list[Comparison]:
    """A single request has no halves, and no part in these targets."""
    return [one for one in comparisons.best if one.in_flight > 1]


def _hidden(results: Results) -> Target:
    goal = f"halves and ahead, where D is at most V: at least {HIDDEN_SHARE:.0%} of drafting hidden"
    found = []
    for row in results.rows():
        figures = row.figures
        if row.point.config not in (HALVES, AHEAD) or row.point.in_flight == 1:
            continue
        if figures.hidden_share is None or not figures.verify_s or figures.draft_s is None:
            continue
        if figures.draft_s <= figures.verify_s:
            text = (
                f"{row.point.config}, k = {row.point.k}, {row.running} in flight: "
                f"{figures.hidden_share:.0%}"
            )
            found.append((figures.hidden_share >= HIDDEN_SHARE, text))
    return _all(goal, found)


def _choice(comparisons: Comparisons) -> Target:
    goal = f"auto over the best of the other pipelines: at least {OF_BEST} everywhere"
    found = [
        (c.ratio.median >= OF_BEST, f"k = {c.k}, {c.in_flight} in flight: {c.ratio} of {c.best}")
        for c in comparisons.choices
        if c.config == AUTO
    ]
    return _all(goal, found)


def _speedups(results: Results) -> list[Target]:
    found = auto_speedups(results)
    targets = []
    for in_flight, least in AUTO_SPEEDUPS.items():
        goal = f"auto over no speculation, {in_flight} in flight: at least {least}"
        if in_flight not in found:
            targets.append(Target(goal, None, ""))
            continue
        speedup, equal = found[in_flight]
        text = str(speedup)
        if equal is not None:
            text += f", and {equal} if no speculation has the sidecar's cores as well"
        targets.append(Target(goal, speedup.median >= least, text))
    return targets


def _all(goal: str, found: Sequence[tuple[bool, str]]) -> Target:
    """Met if all are; those that are not are named, or else how many are."""
    if not found:
        return Target(goal, None, "")
    missed = [text for met, text in found if not met]
    if missed:
        return Target(goal, False, f"{len(missed)} of {len(found)} are not: {'; '.join(missed)}")
    return Target(goal, True, f"all {len(found)} are")


def _cell(one: Comparison) -> str:
    return f"{one.pipeline}, k = {one.k}, {one.in_flight} in flight"


def _against_bound(one: Comparison) -> str:
    return f"{one.ratio}, {one.of_bound:.0%} of {one.bound:.2f}"


def _times(one: Comparison) -> str:
    return f"V {one.verify_s * 1e3:.0f} ms, D {one.draft_s * 1e3:.0f} ms"
