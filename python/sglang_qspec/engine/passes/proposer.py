"""What a pass verifies: draft trees, as wide as they deserve, waited for as long as that pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_qspec.engine.requests.runtime_settings import RuntimeSettings
from sglang_qspec.engine.requests.speculator import Speculator
from sglang_qspec.policy import (
    Choice,
    FirstTokens,
    PassTimes,
    Patience,
    PipelinePlan,
    Punctuality,
    WidthPolicy,
    with_next_steps,
)
from sglang_qspec.theory import Curve
from sglang_qspec.trie import DraftTrees, Source

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class Proposer:
    """Asks the speculator for trees, and keeps the time of passes and waits."""

    def __init__(
        self,
        active: Speculator,
        runtime_settings: RuntimeSettings,
        *,
        on_cpu: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.times = PassTimes()
        self._speculator = active
        self._runtime = runtime_settings
        self._on_cpu = on_cpu
        self._clock = clock
        self._width = WidthPolicy(runtime_settings.draft_token_num, times=self.times)
        self._patience = Patience()
        self._punctuality = Punctuality()
        self._session_count = active.session_count
        """Of the sidecar that the two have learnt from."""
        self._pass_ended: float | None = None
        """When the last decode pass did, or the next one began if there was something between."""
        self._waited = 0.0
        """Seconds since then that were spent waiting for drafts."""
        self._offered: DraftTrees | None = None
        """What the pass that runs has chosen from."""

    def propose(self, batch: ScheduleBatch, plan: PipelinePlan) -> DraftTrees:
        """A tree for each request, of the width that the pass is to have.

        Width 1 is plain decoding. Step drafts that are just being made are waited for: in `ahead`
        for as long as that gains more than a pass with what is there (`policy.Patience`), in the
        other pipelines, whose passes are made for them, unless they are late (`Punctuality`). What
        comes and makes no tree larger buys no time, or it could hold up a pass forever.
        """
        if self._pass_ended is None:
            self._pass_ended = self._clock()
        if self._session_count != self._speculator.session_count:
            self._session_count = self._speculator.session_count
            self._patience, self._punctuality = Patience(), Punctuality()
        rids = [req.rid for req in batch.reqs]
        outputs = [req.output_ids for req in batch.reqs]
        if self._runtime.draft_token_num != self._width.max_width:
            self._width.limit(self._runtime.draft_token_num)
        self._width.fixed = self._runtime.fixed_width
        widest = min(self._width.max_width, plan.width)
        if not self._runtime.enabled or widest == 1 or self._needs_plain_decode(batch):
            return self._speculator.propose(rids, outputs, 1, drafts=False)
        if not self._on_cpu and _is_penalized(batch):
            trees = self._speculator.propose(rids, outputs, widest, drafts=False)
            return trees.best(self._width.choose(trees.scores).width)
        factors = self._speculator.factors(rids)
        size, left = 0, math.inf
        while True:
            trees = self._speculator.propose(rids, outputs, widest)
            if (grown := int(trees.sizes.sum())) > size:
                size, left = grown, math.inf
            choice = self._width.choose(trees.scores, factors)
            left = self._wait(rids, trees, choice, factors, plan.pipeline, left)
            if left <= 0.0:
                self._offered = trees
                return trees.best(choice.width)

    def end_pass(
        self,
        rids: Sequence[str],
        plan: PipelinePlan,
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """A decode pass over these trees has accepted nodes of each, and chosen a token behind."""
        now = self._clock()
        assert self._pass_ended is not None
        rows = len(trees) * trees.width
        seconds = now - self._pass_ended - self._waited
        self.times.observe(len(trees), trees.width, seconds)
        self._speculator.totals.note_pass(plan.pipeline, len(trees), rows, seconds, self._waited)
        self._judge(rids, trees, accepted, bonus_ids)
        self._pass_ended, self._waited = now, 0.0

    def _judge(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """Learn from a pass over `trees` what drafts are worth, and which sources pay."""
        active, offered = self._speculator, self._offered
        talked, active.link_seconds, self._offered = active.link_seconds, 0.0, None
        if offered is None:
            return
        next_ids = [
            trees.token_ids[row, nodes[0]] if nodes else bonus_ids[row]
            for row, nodes in enumerate(accepted)
        ]
        first = FirstTokens.of(offered, np.array(next_ids, dtype=np.int32))
        active.judge(rids, offered, first)
        bs = len(trees)
        if trees.width > 1:
            plain = self.times.seconds(bs, 1)
            extra = self.times.seconds(bs, trees.width) - plain
            active.sources.record(
                trees,
                accepted,
                token_seconds=plain / bs,
                # With one width, rows without drafts would only be padding.
                extra_seconds=0.0 if self._width.fixed else max(0.0, extra),
            )
        else:
            active.sources.judge(offered, first)
        sidecar = Source.STEP if active.lookahead else Source.QUEUE
        active.sources.observe(sidecar, 0, 0, cost=self._waited + talked)

    def interrupt(self) -> None:
        """The next decode pass does not follow the last one at once: its time is its own."""
        self._pass_ended = None
        self._speculator.link_seconds = 0.0

    def _wait(
        self,
        rids: list[str],
        trees: DraftTrees,
        choice: Choice,
        factors: NDArray[np.float64],
        pipeline: str,
        most: float,
    ) -> float:
        """Wait, at most so many seconds, for more of these trees' step drafts if that pays.

        Returns what is left of the wait once any has come; 0 if none has.
        """
        awaited = self._speculator.awaited(rids, trees)
        if not awaited.any():
            return 0.0
        ahead = pipeline == "ahead"
        if ahead:
            agreement = self._speculator.totals.agreement
            hoped = with_next_steps(trees, awaited, agreement)
            seconds = self._patience.seconds(len(rids), choice, self._width.choose(hoped, factors))
        else:
            seconds = self._punctuality.seconds(self._step_seconds(int(awaited.sum())))
        seconds = min(seconds, most)
        if not seconds:
            return 0.0
        began = self._clock()
        came = self._speculator.wait_for_steps(seconds)
        took = self._clock() - began
        if ahead:
            self._patience.observe(len(rids), took, came)
        else:
            self._punctuality.observe(came)
        self._waited += took
        return seconds - took if came else 0.0

    def _step_seconds(self, requests: int) -> float | None:
        """What the sidecar takes to draft one token for each of so many requests."""
        measured = self._speculator.step_times
        return Curve.through(measured)(requests) if measured else None

    def _needs_plain_decode(self, batch: ScheduleBatch) -> bool:
        """Whether tree verification would ignore a sampling parameter of this batch."""
        info = batch.sampling_info
        # Positions of images are not counted in tokens: SGLang's own decode pass knows them.
        has_images = any(req.multimodal_inputs is not None for req in batch.reqs)
        if info.has_watermark_candidates or has_images:
            return True
        return not self._on_cpu and bool(
            info.has_custom_logit_processor
            or info.need_min_p_sampling
            or any(_cuts_twice(req.sampling_params) for req in batch.reqs)
        )


def _cuts_twice(params: Any) -> bool:
    """Whether top-k and top-p apply together.

    SGLang's tree verification takes top-p of what top-k has left, its sampler of all.
    """
    return bool(1 < params.top_k < TOP_K_ALL and params.top_p < 1)


def _is_penalized(batch: ScheduleBatch) -> bool:
    """Whether tokens are penalized by the text before them.

    SGLang's tree verification applies the penalties of the committed text to every node, which is
    not what the target alone would do behind a draft token; `engine.cpu.penalties` does better.
    """
    info = batch.sampling_info
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None
