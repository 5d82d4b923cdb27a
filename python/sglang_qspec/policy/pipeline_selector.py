"""Proposes the pipeline of a batch: the one with the highest predicted throughput.

A prediction only leads to a trial: `policy.DraftTrials` measures the proposed pipeline and decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.pass_times import PassTimes
from sglang_qspec.policy.pipelines import fastest
from sglang_qspec.policy.width import LADDER

FIRST = "ahead"
"""Pipeline while no other one is proposed, and for a batch that cannot be split into halves."""
PERIOD = 16
"""Rounds between two comparisons of the pipelines, at first and while another one wins."""
LONGEST_PERIOD = 128
"""Maximum number of rounds between two comparisons. A comparison takes milliseconds, so each one
that `FIRST` wins doubles the number."""
MARGIN = 1.1
"""Factor by which another pipeline must be predicted to be faster than `FIRST`."""
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
    """Predictions and votes for batch sizes of one binary order of magnitude."""

    due: int = PERIOD
    """Rounds until the next comparison."""
    period: int = PERIOD
    """Rounds between the next two comparisons."""
    rival: str = FIRST
    """Last pipeline that was predicted to be faster by `MARGIN`."""
    votes: int = 0
    """Consecutive comparisons that `rival` has won."""
    widths: dict[str, int] = field(default_factory=dict)
    """Width at which each pipeline is predicted to be fastest."""


class PipelineSelector:
    """Compares the pipelines by the formulas of `policy.pipelines`.

    V comes from the target's passes (`PassTimes`), D from the sidecar's passes, and alpha from the
    accepted tokens. The selector proposes another pipeline only if it is predicted to be clearly
    better several times in a row. Each binary order of magnitude of the batch size has its own
    proposal.
    """

    def __init__(self, times: PassTimes) -> None:
        self._times = times
        self._logs: dict[int, _Log] = {}

    def propose(
        self,
        requests: int,
        *,
        splits: Callable[[], bool],
        widest: int,
        fixed: bool,
        lookahead: int,
        agreement: float,
        step_times: Sequence[tuple[float, float]],
    ) -> str:
        """The pipeline that is worth a trial in the next rounds of a batch, or `FIRST`.

        It is not `halves` unless the batch `splits`. A pass verifies at most `widest` tokens of
        each request, or exactly `widest` if `fixed`. `lookahead` is the maximum length of an
        `ahead` draft in tokens, and `agreement` is alpha. `step_times` are measured (requests,
        seconds) pairs of the sidecar's draft steps.
        """
        if requests < 2 or widest < 2 or not step_times:
            return FIRST
        log = self._logs.setdefault(requests.bit_length(), _Log())
        log.due -= 1
        if log.due == 0:
            widths = (widest,) if fixed else (*(w for w in LADDER[1:] if w < widest), widest)
            step, times = Curve.through(step_times), self._times.seconds
            found = fastest(
                lambda _k: agreement, widths, requests, times, step, lookahead=lookahead
            )
            log.widths = {pipeline: width for pipeline, (_, width) in found.items()}
            if not splits():
                del found["halves"]
            _vote(log, {pipeline: rate for pipeline, (rate, _) in found.items()})
            log.due = log.period
        return log.rival if log.votes >= VOTES else FIRST

    def plan(self, requests: int, pipeline: str, widest: int) -> PipelinePlan:
        """The plan of a round in this pipeline.

        Its passes verify at most `widest` tokens of each request.
        """
        log = self._logs.get(requests.bit_length())
        if pipeline == FIRST or log is None:
            return PipelinePlan(pipeline, widest)
        return PipelinePlan(pipeline, min(log.widths.get(pipeline, widest), widest))


def _vote(log: _Log, expected: Mapping[str, float]) -> None:
    """Count a comparison; `expected` has tokens per second of each pipeline."""
    rival = max(expected, key=expected.__getitem__)
    if expected[rival] < MARGIN * expected[FIRST]:
        log.rival, log.votes = FIRST, 0
        log.period = min(2 * log.period, LONGEST_PERIOD)
    else:
        log.period = PERIOD
        log.votes = log.votes + 1 if rival == log.rival else 1
        log.rival = rival
