"""Chooses the draft trees of a pass and how long the pass waits for step drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.engine.passes.decide import batch_end
from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.policy import (
    Choice,
    DraftDeadline,
    PassTimes,
    PipelinePlan,
    RowBudget,
    WaitBudget,
    WidthPolicy,
    most_width,
    with_next_steps,
)
from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees

Proposing = Generator[float, bool, Proposal]
"""Yields the maximum wait for step drafts in seconds, gets whether some came, and returns the
proposal. A server waits for the link, the planner in simulated time."""


class Shapes(Protocol):
    """The shapes that a pass may have, such as those with CUDA graphs."""

    @property
    def tiers(self) -> Sequence[int]:
        """Allowed totals of tokens of ragged passes, in rising order; empty for all."""

    def widths(self, requests: int) -> Sequence[int] | None:
        """Allowed widths of passes over a batch of this size, in rising order; None for all."""


class AllShapes:
    """No restriction on passes."""

    tiers: Sequence[int] = ()

    def widths(self, requests: int) -> None:
        return None


class Proposer:
    """Chooses the trees of each pass by the measured pass `times`."""

    def __init__(
        self,
        drafts: Drafts,
        runtime_settings: RuntimeSettings,
        times: PassTimes,
        *,
        chains: bool = False,
        shapes: Shapes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafts = drafts
        self._shapes = shapes or AllShapes()
        self._runtime = runtime_settings
        self._clock = clock
        self._times = times
        self._chains = chains
        widest = runtime_settings.draft_token_num
        self._uniform = WidthPolicy(widest, times=times)
        self._ragged = RowBudget(widest, times=times)
        self._budget = WaitBudget()
        self._deadline = DraftDeadline()
        self._session_count = drafts.sidecar.session_count
        """Session of the link in which the wait statistics were measured."""

    def propose(
        self,
        rids: Sequence[str],
        outputs: Sequence[Sequence[int]],
        plan: PipelinePlan,
        *,
        drafts: bool = True,
    ) -> Proposing:
        """Choose a tree for each request; width 1, or no `drafts`, is plain decoding.

        `outputs` has the committed output tokens of each request. With the runtime setting `ragged`
        each tree has its own size; without it, all trees have one width. With `chains` each tree is
        cut to its best path.

        The proposer asks to wait for step drafts that the sidecar is about to send. In `ahead` it
        does while the wait is expected to gain more than a pass with the present drafts
        (`policy.WaitBudget`). In the other pipelines it does unless the drafts are late
        (`policy.DraftDeadline`). Only a draft that enlarges a tree begins a new wait.
        """
        session_count = self._drafts.sidecar.session_count
        if self._session_count != session_count:
            self._session_count = session_count
            self._budget, self._deadline = WaitBudget(), DraftDeadline()
        policy = self._policy(len(rids))
        widest = self._widest(policy, plan.width)
        plain = plan.width == 1 or widest == 1
        if not self._runtime.enabled or plain or not drafts:
            return Proposal(self._drafts.propose(rids, outputs, 1, drafts=False))
        longest = self._drafts.longest_pass(rids)
        choose = partial(policy.choose, factors=self._factors(rids), longest=longest)
        size, left, waited = 0, math.inf, 0.0
        while True:
            trees = self._drafts.propose(rids, outputs, widest)
            if (grown := int(trees.sizes.sum())) > size:
                size, left = grown, math.inf
            usable = trees.chains() if self._chains else trees
            choice = choose(usable.scores)
            took, left = yield from self._wait(rids, usable, choose, choice, plan.pipeline, left)
            waited += took
            if left <= 0.0:
                return Proposal(choice.cut(usable), trees, waited)

    def widest(self, requests: int, most: int) -> int:
        """The largest width of a pass over this number of requests in a plan of width `most`."""
        return self._widest(self._policy(requests), most)

    def _widest(self, policy: WidthPolicy | RowBudget, most: int) -> int:
        """The largest width of a pass by this policy in a plan of width `most`."""
        widest = min(policy.max_width, most)
        if policy is self._uniform and policy.widths is not None:
            widest = next((w for w in policy.widths if w >= widest), policy.widths[-1])
        return widest

    def _factors(self, rids: Sequence[str]) -> NDArray[np.float64]:
        """Factors of the scores of each request's tokens: its credit, and what they are worth."""
        factors = self._drafts.factors(rids)
        weight = batch_end.weight(self._drafts, self._times, len(rids))
        if not weight:
            return factors
        passes = self._drafts.passes_left()
        return factors * self._drafts.last_requests.worth(rids, passes, weight)

    def _policy(self, requests: int) -> WidthPolicy | RowBudget:
        """The policy for the next pass, set to the present runtime settings and the batch size."""
        policy = self._ragged if self._runtime.ragged else self._uniform
        if self._runtime.draft_token_num != policy.max_width:
            policy.limit(self._runtime.draft_token_num)
        self._ragged.fixed = self._runtime.fixed_width
        self._ragged.totals = self._shapes.tiers
        self._uniform.widths = self._allowed(requests)
        return policy

    def _allowed(self, requests: int) -> Sequence[int] | None:
        """Widths that a pass of one width may have; None for all."""
        most, widths = self._runtime.draft_token_num, self._shapes.widths(requests)
        if widths is not None:
            widths = [width for width in widths if width <= most] or widths[:1]
        if not self._runtime.fixed_width:
            return widths
        return (min(most, most_width(requests)),) if widths is None else widths[-1:]

    def _wait(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        choose: Callable[[NDArray[np.float32]], Choice],
        choice: Choice,
        pipeline: str,
        most: float,
    ) -> Generator[float, bool, tuple[float, float]]:
        """Wait at most `most` seconds for step drafts, if the wait is expected to save time.

        `choose` gives the choice for trees with these scores; `choice` is that for `trees`.
        Returns the seconds of the wait and the seconds left; 0 are left if no step draft came.
        """
        awaited = self._drafts.awaited(rids, trees)
        if not awaited.any():
            return 0.0, 0.0
        ahead = pipeline == "ahead"
        if ahead:
            agreement = self._drafts.totals.agreement
            hoped = with_next_steps(trees, awaited, agreement)
            seconds = self._budget.seconds(len(rids), choice, choose(hoped))
        else:
            seconds = self._deadline.seconds(self._step_seconds(int(awaited.sum())))
        seconds = min(seconds, most)
        if not seconds:
            return 0.0, 0.0
        began = self._clock()
        came = yield seconds
        took = self._clock() - began
        if ahead:
            self._budget.observe(len(rids), took, came)
        else:
            self._deadline.observe(came)
        return took, seconds - took if came else 0.0

    def _step_seconds(self, requests: int) -> float | None:
        """Seconds that the sidecar needs for one token of each request; None if unknown."""
        measured = self._drafts.sidecar.step_times
        return Curve.through(measured)(requests) if measured else None
