"""Chooses the pipeline and the width of each decode round."""

from __future__ import annotations

from collections.abc import Callable

from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.policy import PassTimes, PipelinePlan, PipelineSelector
from sglang_qspec.policy.runtime_settings import RuntimeSettings


class Rounds:
    """Plans rounds, and lets the sidecar draft as far as each plan needs."""

    def __init__(self, drafts: Drafts, runtime: RuntimeSettings, times: PassTimes) -> None:
        self._drafts = drafts
        self._runtime = runtime
        self._selector = PipelineSelector(times)

    def begin(
        self, requests: int, *, splits: Callable[[], bool], drafted: bool = True
    ) -> PipelinePlan:
        """Begin a round over this number of requests, and return its plan.

        `splits` says whether the batch can be served in halves. A round that is not `drafted` has
        no step drafts, because the sidecar has no time for them.
        """
        plan = PipelinePlan("queue", self._runtime.draft_token_num)
        if drafted:
            plan = self._choose(requests, splits)
        self._drafts.totals.pipeline = plan.pipeline
        self._drafts.sidecar.lookahead = self._runtime.lookahead(plan.pipeline, plan.width)
        return plan

    def _choose(self, requests: int, splits: Callable[[], bool]) -> PipelinePlan:
        widest = self._runtime.draft_token_num
        plan = PipelinePlan(self._runtime.mode if self._runtime.enabled else "queue", widest)
        if plan.pipeline == "auto":
            plan = self._selector.choose(
                requests,
                widest=widest,
                fixed=self._runtime.fixed_width,
                lookahead=self._runtime.step_tokens,
                agreement=self._drafts.totals.agreement,
                step_times=self._drafts.sidecar.step_times,
            )
        if plan.pipeline == "halves" and not splits():
            return PipelinePlan("ahead", widest)
        return plan
