"""The simulated target: admits requests to slots, prefills, and runs passes.

What a pass verifies and how long it waits, and what is learnt from its result, is decided by the
server's own code (`engine.passes.decide`), over simulated drafts and in simulated time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_qspec.config import PIPELINES, QSpecConfig
from sglang_qspec.engine.passes.decide import batch_end
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.decide.halves import Halves
from sglang_qspec.engine.passes.decide.proposer import Proposer
from sglang_qspec.engine.passes.decide.rounds import Rounds
from sglang_qspec.policy import (
    GPU_COST,
    DraftTrials,
    DraftUse,
    PassCost,
    PassTimes,
    PipelinePlan,
)
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.clock import Clock, Process, Signal, Wait
from sglang_qspec.tools.plan.drafts import RIGHT, SimulatedDrafts
from sglang_qspec.tools.plan.requests import SimulatedRequest
from sglang_qspec.tools.plan.sidecar import Sidecar

PREFILL_TOKENS = 8192
"""Prompt tokens after which a prefill takes no further request (SGLang's `chunked_prefill_size`)"""
NONE = "none"
"""Name of serving without speculation, beside `config.MODES`."""


@dataclass
class PassCounts:
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


class Captured:
    """The shapes of passes that have CUDA graphs; without a GPU, all shapes."""

    tiers: Sequence[int] = ()

    def __init__(self, tables: Tables) -> None:
        widest = tables.passes.widest
        captured = sorted({1, widest} | {widest >> n for n in (1, 2, 3) if widest >> n})
        self._widths = captured if tables.on_gpu else None

    def widths(self, requests: int) -> Sequence[int] | None:  # noqa: ARG002
        """The widths with graphs; None for all."""
        return self._widths


class SimulatedTarget:
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
        self._slots = slots
        self._enabled = enabled = pipeline != NONE
        mode = pipeline if enabled else "queue"
        runtime = RuntimeSettings(
            mode,
            QSpecConfig.step_tokens,
            tables.passes.widest,
            fixed_width=False,
            ragged=not tables.on_gpu,
            enabled=enabled,
        )
        times = PassTimes(GPU_COST if tables.on_gpu else PassCost())
        self._arrived, self._came = Signal(), Signal()
        self._link = sidecar.connect(self._came)
        self._drafts = SimulatedDrafts(
            clock,
            tables,
            self._link,
            rng,
            reports=enabled,
            matches_again=pipeline == "queue",
        )
        self._proposer = Proposer(
            self._drafts, runtime, times, shapes=Captured(tables), clock=clock.time
        )
        self._accounting = PassAccounting(self._drafts, runtime, clock.time, times=times)
        self._rounds = Rounds(self._drafts, runtime, times)
        self._times = times
        self._trials = DraftTrials() if enabled and pipeline not in PIPELINES else None
        self._halves = Halves()
        self._queue: deque[SimulatedRequest] = deque()
        self._running: list[SimulatedRequest] = []
        self.counts = PassCounts()

    def arrive(self, request: SimulatedRequest) -> None:
        """Queue a request."""
        self._queue.append(request)
        self._link.submit(request)
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
        self._accounting.interrupt()
        admitted: list[SimulatedRequest] = []
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
            self._drafts.admit(request)
        self._running += [request for request in admitted if request.finished is None]

    def _round(self) -> Process:
        rids = [request.rid for request in self._running]
        self._drafts.others_wait = bool(self._queue)
        use = DraftUse.ALL
        if self._trials is not None:
            proposed = self._rounds.propose(len(rids), splits=self._splits)
            weight = batch_end.weight(self._drafts, self._times, len(rids))
            use = self._trials.choose(len(rids), proposed=proposed, weight=weight)
        plan = self._rounds.begin(
            len(rids), splits=self._splits, use=use, keeps_drafting=use is DraftUse.NONE
        )
        if self._drafts.sidecar.source in self._drafts.sources.paused:
            self._link.lookahead = 0
        parts = [rids]
        if plan.pipeline == "halves":
            parts = [[rids[row] for row in half] for half in self._halves.split(rids)]
        for part in parts:
            yield from self._pass(part, plan)
        self._running = [request for request in self._running if request.finished is None]

    def _splits(self) -> bool:
        """Whether a round can be served in halves."""
        return not self._tables.on_gpu and len(self._running) > 1 and self._link.ready

    def _pass(self, rids: Sequence[str], plan: PipelinePlan) -> Process:
        self._accounting.begin()
        proposing = self._proposer.propose(rids, [()] * len(rids), plan)
        try:
            longest = next(proposing)
            while True:
                longest = proposing.send((yield Wait(self._came, longest)))
        except StopIteration as end:
            proposal = end.value
        trees = proposal.trees
        seconds = self._tables.passes(len(rids), trees.rows / len(rids))
        if self._sidecar.busy:
            seconds *= self._tables.slowdown
        if self._enabled:
            seconds += self._tables.gap_seconds(len(rids))
        yield seconds
        accepted = self._drafts.right(rids, trees)
        before = sum(request.done for request in self._running)
        self._accounting.record(rids, plan.pipeline, proposal, accepted, [RIGHT] * len(rids))
        tokens = sum(request.done for request in self._running) - before
        self._count(len(rids), seconds, proposal.waited, tokens)
        if self._trials is not None:
            plain_rate = len(rids) / self._times.seconds(len(rids), 1)
            progress = batch_end.progress(self._drafts, rids, accepted)
            spent = seconds + proposal.waited
            self._trials.observe(tokens, 0, spent, plain_rate, progress=progress)

    def _count(self, requests: int, seconds: float, waited: float, tokens: int) -> None:
        self.counts.passes += 1
        self.counts.pass_requests += requests
        self.counts.seconds += seconds
        self.counts.waited += waited
        self.counts.tokens += tokens
        if len(self._running) == self._slots:
            self.counts.full_seconds += seconds + waited
            self.counts.full_tokens += tokens
