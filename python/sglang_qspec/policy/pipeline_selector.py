"""Which pipeline a batch is served in: the fastest one, by the times that are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_qspec.config import PIPELINES
from sglang_qspec.policy.pass_times import PassTimes
from sglang_qspec.policy.width import LADDER
from sglang_qspec.theory import Curve, rates

FIRST = "ahead"
"""The pipeline before anything is measured, and of a batch that has no halves."""
PERIOD = 16
"""Rounds between two comparisons."""
MARGIN = 1.1
"""How many times as fast another pipeline must be expected to be."""
VOTES = 3
"""Comparisons in a row that it must win."""


@dataclass(frozen=True)
class PipelinePlan:
    """How the next round of a batch is served."""

    pipeline: str
    width: int
    """Tokens of a request that a pass verifies, at most. What is drafted between two passes, or
    for a half, is waited for, so it must not be more than pays."""


@dataclass
class _Log:
    """What was decided for batches of one binary order of magnitude."""

    pipeline: str = FIRST
    width: int = 1
    """At which it is expected to be the fastest."""
    rounds: int = 0
    rival: str = FIRST
    votes: int = 0


class PipelineSelector:
    """Weighs the pipelines by the formulas of `sglang_qspec.theory`.

    V comes from the passes of the target (`PassTimes`), D from those of the sidecar, and how good
    the drafts are from what was accepted. A pipeline is left for one that is clearly better several
    times in a row, so that noise does not make the batch change course, which costs a round of
    drafts. Each order of magnitude of requests has a course of its own.
    """

    def __init__(self, times: PassTimes) -> None:
        self._times = times
        self._logs: dict[int, _Log] = {}

    def choose(
        self,
        requests: int,
        *,
        widest: int,
        fixed: bool,
        lookahead: int,
        agreement: float,
        step_times: Sequence[tuple[float, float]],
    ) -> PipelinePlan:
        """The course for the next round of so many requests.

        Passes have at most `widest` tokens for each, or exactly so many if that is `fixed`, and
        drafts of `ahead` run up to `lookahead` ahead; `agreement` is alpha, and `step_times` are
        (requests, seconds) of the sidecar's steps.
        """
        if requests < 2 or widest < 2 or not step_times:
            return PipelinePlan(FIRST, widest)
        log = self._logs.setdefault(requests.bit_length(), _Log())
        log.rounds += 1
        if log.rounds % PERIOD == 0:
            widths = (widest,) if fixed else (*(w for w in LADDER[1:] if w < widest), widest)
            step = Curve.through(step_times)
            _steer(log, self._expected(requests, widths, lookahead, agreement, step))
        ahead = log.pipeline == "ahead"
        return PipelinePlan(log.pipeline, widest if ahead else min(log.width, widest))

    def _expected(
        self, requests: int, widths: Sequence[int], lookahead: int, agreement: float, step: Curve
    ) -> dict[str, tuple[float, int]]:
        """Tokens per second of each pipeline at the width that suits it best, and this width."""
        best = dict.fromkeys(PIPELINES, (0.0, 1))
        for width in widths:
            k = width - 1
            found = rates(
                agreement,
                k,
                requests,
                self._times.seconds,
                _drafting(step, k),
                lookahead=max(lookahead, k),
            )
            for pipeline in PIPELINES:
                best[pipeline] = max(best[pipeline], (found[pipeline], width))
        return best


def _steer(log: _Log, expected: dict[str, tuple[float, int]]) -> None:
    rival = max(expected, key=expected.__getitem__)
    if expected[rival][0] < MARGIN * expected[log.pipeline][0]:
        log.votes = 0
    else:
        log.votes = log.votes + 1 if rival == log.rival else 1
        log.rival = rival
        if log.votes >= VOTES:
            log.pipeline, log.votes = rival, 0
    log.width = expected[log.pipeline][1]


def _drafting(step: Curve, k: int) -> Callable[[int], float]:
    """D: the seconds of `k` steps by the requests that they are for."""
    return lambda requests: k * step(requests)
