"""Which pipeline a batch is served in: the fastest one, by the times that are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_qspec.budget.pass_times import PassTimes
from sglang_qspec.budget.width import LADDER
from sglang_qspec.config import PIPELINES
from sglang_qspec.theory import Curve, rates

FIRST = "ahead"
"""The pipeline before anything is measured, and of a batch that has no halves."""
PERIOD = 16
"""Rounds between two comparisons."""
MARGIN = 1.1
"""How many times as fast another pipeline must be expected to be."""
VOTES = 3
"""Comparisons in a row that it must win."""


@dataclass
class _Course:
    """What was decided for batches of one binary order of magnitude."""

    pipeline: str = FIRST
    rounds: int = 0
    rival: str = FIRST
    votes: int = 0


class Pilot:
    """Weighs the pipelines by the formulas of `sglang_qspec.theory`.

    V comes from the passes of the target (`PassTimes`), D from those of the sidecar, and how good
    the drafts are from what was accepted. A pipeline is left for one that is clearly better several
    times in a row, so that noise does not make the batch change course, which costs a round of
    drafts. Each order of magnitude of requests has a course of its own.
    """

    def __init__(self, times: PassTimes) -> None:
        self._times = times
        self._courses: dict[int, _Course] = {}

    def choose(
        self,
        requests: int,
        *,
        widest: int,
        lead: int,
        agreement: float,
        step_times: Sequence[tuple[float, float]],
    ) -> str:
        """The pipeline of the next round of so many requests.

        Passes have at most `widest` tokens for each, and drafts of `ahead` run up to `lead` ahead;
        `agreement` is alpha, and `step_times` are (requests, seconds) of the sidecar's steps.
        """
        if requests < 2 or widest < 2 or not step_times:
            return FIRST
        course = self._courses.setdefault(requests.bit_length(), _Course())
        course.rounds += 1
        if course.rounds % PERIOD == 0:
            expected = self._expected(requests, widest, lead, agreement, Curve.through(step_times))
            self._steer(course, expected)
        return course.pipeline

    def _expected(
        self, requests: int, widest: int, lead: int, agreement: float, step: Curve
    ) -> dict[str, float]:
        """Tokens per second of each pipeline at the width that suits it best."""
        best = dict.fromkeys(PIPELINES, 0.0)
        for width in (*(w for w in LADDER[1:] if w < widest), widest):
            k = width - 1
            found = rates(
                agreement,
                k,
                requests,
                self._times.seconds,
                _drafting(step, k),
                lead=max(lead, k),
            )
            for pipeline in PIPELINES:
                best[pipeline] = max(best[pipeline], found[pipeline])
        return best

    def _steer(self, course: _Course, expected: dict[str, float]) -> None:
        rival = max(expected, key=expected.__getitem__)
        if expected[rival] < MARGIN * expected[course.pipeline]:
            course.votes = 0
            return
        course.votes = course.votes + 1 if rival == course.rival else 1
        course.rival = rival
        if course.votes >= VOTES:
            course.pipeline, course.votes = rival, 0


def _drafting(step: Curve, k: int) -> Callable[[int], float]:
    """D: the seconds of `k` steps by the requests that they are for."""
    return lambda requests: k * step(requests)
