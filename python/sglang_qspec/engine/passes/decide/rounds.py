"""Plans each decode round: its pipeline and its width."""

from __future__ import annotations

from collections.abc import Callable

from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.policy import DraftUse, PassTimes, PipelinePlan, PipelineSelector
from sglang_qspec.policy.runtime_settings import RuntimeSettings

OF_PIPELINE = {
    "ahead": DraftUse.ALL,
    "sequential": DraftUse.SEQUENTIAL,
    "halves": DraftUse.HALVES,
}
"""The use of drafts that stands for each pipeline that `auto` can choose."""
PIPELINE_OF = {use: pipeline for pipeline, use in OF_PIPELINE.items()}


class Rounds:
    """Plans rounds, and lets the sidecar draft as far as each plan needs."""

    def __init__(self, drafts: Drafts, runtime: RuntimeSettings, times: PassTimes) -> None:
        self._drafts = drafts
        self._runtime = runtime
        self._selector = PipelineSelector(times)

    def propose(self, requests: int, *, splits: Callable[[], bool]) -> DraftUse:
        """The use with step drafts that is predicted to be the best for the next round.

        `splits` says whether the batch can be served in halves.
        """
        if self._mode != "auto":
            return DraftUse.ALL
        pipeline = self._selector.propose(
            requests,
            splits=splits,
            widest=self._runtime.draft_token_num,
            fixed=self._runtime.fixed_width,
            lookahead=self._runtime.step_tokens,
            agreement=self._drafts.totals.agreement,
            step_times=self._drafts.sidecar.step_times,
        )
        return OF_PIPELINE[pipeline]

    def begin(
        self,
        requests: int,
        *,
        splits: Callable[[], bool],
        use: DraftUse = DraftUse.ALL,
        keeps_drafting: bool = False,
    ) -> PipelinePlan:
        """Begin a round over this number of requests, and return its plan.

        `splits` is as in `propose`. Only a round whose `use` has step drafts gets any. With
        `keeps_drafting` the sidecar goes on as in the last round.
        """
        plan = PipelinePlan("queue", 1 if use is DraftUse.NONE else self._runtime.draft_token_num)
        if use.has_steps:
            plan = self._plan(requests, use, splits)
        self._drafts.totals.pipeline = plan.pipeline
        if not keeps_drafting:
            self._drafts.sidecar.lookahead = self._runtime.lookahead(plan.pipeline, plan.width)
        return plan

    @property
    def _mode(self) -> str:
        return self._runtime.mode if self._runtime.enabled else "queue"

    def _plan(self, requests: int, use: DraftUse, splits: Callable[[], bool]) -> PipelinePlan:
        """The plan of a round with step drafts, unless the settings exclude these."""
        widest, mode = self._runtime.draft_token_num, self._mode
        pipeline = PIPELINE_OF[use] if mode == "auto" else mode
        if pipeline == "halves" and not splits():
            return PipelinePlan("ahead", widest)
        if mode == "auto":
            return self._selector.plan(requests, pipeline, widest)
        return PipelinePlan(pipeline, widest)
