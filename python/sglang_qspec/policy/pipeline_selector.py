"""Selects the pipeline of a batch: the one with the highest predicted throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.pass_times import PassTimes
from sglang_qspec.policy.pipelines import fastest
from sglang_qspec.policy.width import LADDER

FIRST = "ahead"
"""Pipeline before anything is measured, and for a batch that cannot be split into halves."""
PERIOD = 16
"""Rounds between two comparisons of the pipelines."""
MARGIN = 1.1
"""Factor by which another pipeline must be predicted to be faster."""
VOTES = 3
"""Consecutive comparisons that the other pipeline must win."""


@dataclass(frozen=True)
class PipelinePlan:
    """Pipeline and maximum width for the next round of a batch."""

    pipeline: str
    """One of `config.PIPELINES`."""
    width: int
    """Maximum number of tokens that a pass verifies for each request. `sequential` and `halves`
    wait for their drafts, so they get the width with the highest predicted throughput."""


@dataclass
class _Log:
    """Decision and votes for batch sizes of one binary order of magnitude."""

    pipeline: str = FIRST
    width: int = 1
    """Width at which `pipeline` is predicted to be fastest."""
    rounds: int = 0
    """Rounds served so far."""
    rival: str = FIRST
    """Last pipeline that was predicted to be faster by `MARGIN`."""
    votes: int = 0
    """Consecutive comparisons that `rival` has won."""


class PipelineSelector:
    """Compares the pipelines by the formulas of `policy.pipelines`.

    V comes from the target's passes (`PassTimes`), D from the sidecar's passes, and alpha from the
    accepted tokens. The selector changes the pipeline only if another one is clearly better several
    times in a row, because a change costs a round of drafts. Each binary order of magnitude of the
    batch size has its own selection.
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
        """The plan for the next round of a batch.

        A pass verifies at most `widest` tokens of each request, or exactly `widest` if `fixed`.
        `lookahead` is the maximum length of an `ahead` draft in tokens, and `agreement` is alpha.
        `step_times` are measured (requests, seconds) pairs of the sidecar's draft steps.
        """
        if requests < 2 or widest < 2 or not step_times:
            return PipelinePlan(FIRST, widest)
        log = self._logs.setdefault(requests.bit_length(), _Log())
        log.rounds += 1
        if log.rounds % PERIOD == 0:
            widths = (widest,) if fixed else (*(w for w in LADDER[1:] if w < widest), widest)
            step, times = Curve.through(step_times), self._times.seconds
            found = fastest(
                lambda _k: agreement, widths, requests, times, step, lookahead=lookahead
            )
            _steer(log, found)
        ahead = log.pipeline == "ahead"
        return PipelinePlan(log.pipeline, widest if ahead else min(log.width, widest))


def _steer(log: _Log, expected: Mapping[str, tuple[float, int]]) -> None:
    """Count a comparison; `expected` has tokens per second and width of each pipeline."""
    rival = max(expected, key=lambda pipeline: expected[pipeline])
    if expected[rival][0] < MARGIN * expected[log.pipeline][0]:
        log.votes = 0
    else:
        log.votes = log.votes + 1 if rival == log.rival else 1
        log.rival = rival
        if log.votes >= VOTES:
            log.pipeline, log.votes = rival, 0
    log.width = expected[log.pipeline][1]
