"""Chooses the pipeline and the width of each decode round."""

from __future__ import annotations

from collections.abc import Callable

from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.policy import DraftUse, PassTimes, PipelinePlan, PipelineSelector
from sglang_qspec.policy.runtime_settings import RuntimeSettings


class Rounds:
    """Plans rounds, and lets the sidecar draft as far as each plan needs."""

    def __init__(self, drafts: Drafts, runtime: RuntimeSettings, times: PassTimes) -> None:
        self._drafts = drafts
        self._runtime = runtime
        self._selector = PipelineSelector(times)

    def begin(
        self,
        requests: int,
        *,
        splits: Callable[[], bool],
        use: DraftUse = DraftUse.ALL,
        keeps_drafting: bool = False,
    ) -> PipelinePlan:
        """Begin a round over this number of requests, and return its plan.

        `splits` says whether the batch can be served in halves. Only a round with the `use` ALL has
        step drafts. With `keeps_drafting` the sidecar goes on as in the last round.
        """
        plan = PipelinePlan("queue", 1 if use is DraftUse.NONE else self._runtime.draft_token_num)
        if use is DraftUse.ALL:
            plan = self._choose(requests, splits)
        self._drafts.totals.pipeline = plan.pipeline
        if not keeps_drafting:
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
