"""The simulated target: admits requests to slots, prefills, and runs passes with the policies.

The policies are the server's own objects (`sglang_qspec.policy`); they get simulated time. The
order of their calls follows `engine/passes/lead.py`, `proposer.py` and `accounting.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.config import QSpecConfig
from sglang_qspec.policy import (
    GPU_COST,
    Choice,
    DraftDeadline,
    FirstTokens,
    PassCost,
    PassTimes,
    PipelinePlan,
    PipelineSelector,
    RowBudget,
    Sources,
    WaitBudget,
    WidthPolicy,
    with_next_steps,
)
from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.policy.totals import Totals
from sglang_qspec.tools.plan.clock import Clock, Process, Signal, Wait
from sglang_qspec.tools.plan.requests import Request
from sglang_qspec.tools.plan.sidecar import Sidecar
from sglang_qspec.tools.plan.tables import Tables
from sglang_qspec.trie import DraftTrees, Source

PREFILL_TOKENS = 8192
"""Prompt tokens after which a prefill takes no further request (SGLang's `chunked_prefill_size`)"""
NONE = "none"
"""Name of serving without speculation, beside `config.MODES`."""


@dataclass
class Counts:
    """What a target has done."""

    passes: int = 0
    pass_requests: int = 0
    """Batch sizes, summed over the passes."""
    seconds: float = 0.0
    """Times of the passes, summed, without waits."""
    waited: float = 0.0
    """Seconds of waits for drafts."""
    tokens: int = 0
    """Output tokens of the passes."""
    prefill_seconds: float = 0.0
    full_seconds: float = 0.0
    """Seconds of the passes, waits included, while all slots were taken."""
    full_tokens: int = 0
    """Output tokens of the passes in `full_seconds`."""

    @property
    def steady_seconds(self) -> float | None:
        """Seconds of all prefills and tokens with all slots taken; None if they never were."""
        if not self.full_tokens:
            return None
        return self.prefill_seconds + self.tokens * self.full_seconds / self.full_tokens


class Target:
    """One target with `slots`; `pipeline` is NONE or one of `config.MODES`."""

    def __init__(
        self,
        clock: Clock,
        tables: Tables,
        sidecar: Sidecar,
        pipeline: str,
        slots: int,
        rng: np.random.Generator,
    ) -> None:
        self._clock, self._tables, self._sidecar = clock, tables, sidecar
        self._slots, self._rng = slots, rng
        self._speculates = pipeline != NONE
        mode = pipeline if self._speculates else "queue"
        self._runtime = RuntimeSettings(mode, QSpecConfig.step_tokens, tables.widest, False)
        self._times = PassTimes(GPU_COST if tables.on_gpu else PassCost())
        self._policy = self._new_policy()
        self._selector = PipelineSelector(self._times)
        self._totals = Totals()
        self._sources = Sources(lambda: clock.now)
        self._steps = [(row.rows, row.seconds) for row in tables.draft_steps]
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []
        self._arrived = Signal()
        self._drafts = Signal()
        self._server = sidecar.connect(self._drafts)
        self._meet_sidecar()
        self._lookahead = 0
        self.counts = Counts()

    def _new_policy(self) -> WidthPolicy | RowBudget:
        widest = self._tables.widest
        if not self._tables.on_gpu:
            return RowBudget(widest, times=self._times)
        captured = sorted({1, widest} | {widest >> n for n in (1, 2, 3) if widest >> n})
        return WidthPolicy(widest, times=self._times, widths=captured)

    def _meet_sidecar(self) -> None:
        self._session = self._sidecar.sessions
        self._budget, self._deadline = WaitBudget(), DraftDeadline()

    def arrive(self, request: Request) -> None:
        """Queue a request."""
        self._queue.append(request)
        if self._speculates:
            self._sidecar.submit(self._server, request)
        self._arrived.fire()

    def serve(self) -> Process:
        """Serve all requests that arrive."""
        while True:
            if self._queue and len(self._running) < self._slots:
                yield from self._prefill()
            elif self._running:
                yield from self._round()
            else:
                yield Wait(self._arrived)

    def _prefill(self) -> Process:
        admitted: list[Request] = []
        tokens = 0
        while self._queue and len(self._running) + len(admitted) < self._slots:
            if admitted and tokens + self._queue[0].arrival.prompt > PREFILL_TOKENS:
                break
            admitted.append(self._queue.popleft())
            admitted[-1].admitted = self._clock.now
            tokens += admitted[-1].arrival.prompt
        seconds = self._tables.prefill.seconds(tokens)
        yield seconds
        self.counts.prefill_seconds += seconds
        for request in admitted:
            request.first = self._clock.now
            self._commit(request, 1)
        self._running += [request for request in admitted if request.finished is None]

    def _round(self) -> Process:
        plan, parts = self._plan(), [self._running]
        if plan.pipeline == "halves":
            middle = (len(self._running) + 1) // 2
            parts = [self._running[:middle], self._running[middle:]]
        self._totals.pipeline = plan.pipeline
        self._lookahead = self._runtime.lookahead(plan.pipeline, plan.width)
        if Source.STEP in self._sources.paused:
            self._lookahead = 0
        for part in parts:
            yield from self._pass(part, plan)
        self._running = [request for request in self._running if request.finished is None]

    def _plan(self) -> PipelinePlan:
        """The pipeline and the width of the next round."""
        count, widest = len(self._running), self._runtime.draft_token_num
        plan = PipelinePlan(self._runtime.mode, widest)
        if plan.pipeline == "auto":
            plan = self._selector.choose(
                count,
                widest=widest,
                fixed=False,
                lookahead=self._runtime.step_tokens,
                agreement=self._totals.agreement,
                step_times=self._steps,
            )
        splits = not self._tables.on_gpu and count > 1 and self._sidecar.ready
        if plan.pipeline == "halves" and not splits:
            return PipelinePlan("ahead", widest)
        return plan

    def _pass(self, part: Sequence[Request], plan: PipelinePlan) -> Process:
        count = len(part)
        if not self._speculates:
            plain = self._tables.verify_seconds(count, 1)
            yield plain
            self._count(count, plain, 0.0, sum(self._commit(request, 1) for request in part))
            return
        trees, cut, waited = yield from self._propose(part, plan)
        rows = cut.rows / count
        seconds = self._tables.verify_seconds(count, rows)
        if self._sidecar.busy:
            seconds *= self._tables.slowdown
        yield seconds
        self._times.observe(count, rows, seconds)
        self._count(count, seconds, waited, self._settle(part, trees, cut, waited))

    def _count(self, requests: int, seconds: float, waited: float, tokens: int) -> None:
        self.counts.passes += 1
        self.counts.pass_requests += requests
        self.counts.seconds += seconds
        self.counts.waited += waited
        self.counts.tokens += tokens
        if len(self._running) == self._slots:
            self.counts.full_seconds += seconds + waited
            self.counts.full_tokens += tokens

    def _propose(
        self, part: Sequence[Request], plan: PipelinePlan
    ) -> Generator[float | Wait, bool, tuple[DraftTrees, DraftTrees, float]]:
        """The drafts at hand, those that the pass verifies, and the seconds of the wait."""
        if self._session != self._sidecar.sessions:
            self._meet_sidecar()
        widest = min(plan.width, self._tables.widest)
        factors = np.array([request.credit.factor for request in part])
        size, left, waited = 0, math.inf, 0.0
        while True:
            trees = self._trees(part, widest)
            if (grown := int(trees.sizes.sum())) > size:
                size, left = grown, math.inf
            choice = self._policy.choose(trees.scores, factors)
            awaited = self._awaited(part, trees)
            seconds = min(left, self._wait_limit(trees, awaited, choice, factors, plan.pipeline))
            if seconds <= 0.0:
                return trees, choice.cut(trees), waited
            began = self._clock.now
            came = yield Wait(self._drafts, seconds)
            took = self._clock.now - began
            if plan.pipeline == "ahead":
                self._budget.observe(len(part), took, came)
            else:
                self._deadline.observe(came)
            waited += took
            left = seconds - took if came else 0.0

    def _awaited(self, part: Sequence[Request], trees: DraftTrees) -> NDArray[np.bool_]:
        """Which requests get step drafts that a wait could use (`Speculator.awaited`)."""
        if not self._lookahead or not self._sidecar.ready:
            return np.zeros(len(part), dtype=np.bool_)
        sizes = trees.sizes.tolist()
        return np.array(
            [
                (size < trees.width or self._lookahead < trees.width)
                and request.available < min(self._lookahead, request.size - request.done)
                for request, size in zip(part, sizes, strict=True)
            ]
        )

    def _wait_limit(
        self,
        trees: DraftTrees,
        awaited: NDArray[np.bool_],
        choice: Choice,
        factors: NDArray[np.float64],
        pipeline: str,
    ) -> float:
        """Maximum wait for drafts in seconds, as `Proposer._wait` computes it."""
        if not awaited.any():
            return 0.0
        if pipeline == "ahead":
            hoped = with_next_steps(trees, awaited, self._totals.agreement)
            return self._budget.seconds(len(trees), choice, self._policy.choose(hoped, factors))
        return self._deadline.seconds(Curve.through(self._steps)(int(awaited.sum())))

    def _trees(self, part: Sequence[Request], width: int) -> DraftTrees:
        """The drafts at hand as chains of at most `width` nodes.

        The score of a node is the average agreement to the power of its depth.
        """
        source = Source.STEP if self._lookahead else Source.QUEUE
        drafts = np.zeros(len(part), dtype=np.int32)
        if source not in self._sources.paused:
            room = width - 1
            drafts[:] = [min(r.available, room, r.size - r.done - 1) for r in part]
        nodes = np.arange(width)
        inside = nodes <= drafts[:, None]
        scores = np.where(inside, np.power(self._totals.agreement, nodes), 0.0)
        wrong = np.array([r.next_wrong[r.done] == r.done for r in part])
        token_ids = np.ones(inside.shape, dtype=np.int32)
        token_ids[wrong] = 2
        return DraftTrees(
            token_ids,
            np.broadcast_to(np.maximum(nodes - 1, 0).astype(np.int32), inside.shape).copy(),
            np.full(inside.shape, source, dtype=np.uint8),
            scores.astype(np.float32),
            drafts + 1,
        )

    def _settle(
        self, part: Sequence[Request], trees: DraftTrees, cut: DraftTrees, waited: float
    ) -> int:
        """Commit the tokens of a pass, and update the statistics as `PassAccounting` does.

        Returns the number of tokens.
        """
        count = len(part)
        verified = (cut.sizes - 1).tolist()
        right = [request.right(n) for request, n in zip(part, verified, strict=True)]
        for n, accepted in zip(verified, right, strict=True):
            if n:
                self._totals.learn_agreement(accepted, missed=accepted < n)
        first = FirstTokens.of(trees, np.ones(count, dtype=np.int32))
        claimed = (trees.scores * first.proposed).sum(axis=1).tolist()
        hits = np.any(first.right, axis=1)
        for request, claim, hit in zip(part, claimed, hits, strict=True):
            if claim:
                request.credit.observe(claim, bool(hit))
        if cut.width > 1:
            plain = self._times.seconds(count, 1)
            extra = self._times.seconds(count, cut.rows / count) - plain
            nodes = [range(1, n + 1) for n in right]
            costs = {"token_seconds": plain / count, "extra_seconds": max(0.0, extra)}
            self._sources.record(cut, nodes, **costs)
        else:
            self._sources.update(trees, first)
        source = Source.STEP if self._lookahead else Source.QUEUE
        self._sources.observe(source, 0, 0, cost=waited)
        return sum(self._commit(r, accepted + 1) for r, accepted in zip(part, right, strict=True))

    def _commit(self, request: Request, tokens: int) -> int:
        """Add output tokens, and report them to the sidecar. Returns their number."""
        tokens = min(tokens, request.size - request.done)
        request.done += tokens
        if request.done == request.size:
            request.finished = self._clock.now
            self._sidecar.close(self._server, request)
            return tokens
        if not self._speculates:
            return tokens
        left = request.next_wrong[request.seen_begin] < request.done
        if self._runtime.mode == "queue" and left and self._rng.random() < self._tables.again:
            # The text has left the queue draft, and matches a later place of it.
            request.seen_begin = request.done
        self._sidecar.commit(self._server, request, self._lookahead)
        return tokens
