"""Updates all statistics after a decode pass: tallies, pass times, credit and draft sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_qspec.engine.passes.decide import batch_end
from sglang_qspec.engine.passes.decide.core_use import CoreUse
from sglang_qspec.engine.passes.decide.drafts import Drafts
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.policy import FirstTokens, PassTimes, PrefillRows
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees, Source


@dataclass
class _Run:
    """Passes without drafts over the same requests, one after the other."""

    rids: Sequence[str]
    pipeline: str
    proposal: Proposal
    """What all of the passes verify: the roots."""
    seconds: list[float | None] = field(default_factory=list)
    """Seconds of each pass; None after an interruption."""


class PassAccounting:
    """Owns the pass times, and updates all statistics with the result of each pass."""

    def __init__(
        self,
        drafts: Drafts,
        runtime: RuntimeSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        times: PassTimes | None = None,
        rows: PrefillRows | None = None,
        core_use: CoreUse | None = None,
    ) -> None:
        self.times = times or PassTimes()
        self._rows = rows or PrefillRows(self.times)
        self._core_use = core_use
        self._drafts = drafts
        self._runtime = runtime
        self._clock = clock
        self._began: float | None = None
        """Start of the present pass in seconds of the clock, usually the end of the last pass; None
        after an interruption."""
        self._run: _Run | None = None
        """The latest passes, if `count_plain` has counted them."""

    def begin(self, context: float | None = None) -> None:
        """Start a pass. Its time counts from the end of the last pass; after `interrupt`, from now.

        `context` is the average length of the requests' texts in tokens; None if the host does not
        know it.
        """
        if context is not None:
            self.times.enter(context)
        if self._began is None:
            self._began = self._clock()

    def interrupt(self) -> None:
        """Note that the scheduler runs something else, so the next pass counts from its own start.

        The time of a pass that still runs is not measured.
        """
        self.end_run()
        self._began = None
        self._drafts.take_link_seconds()

    def restart(self) -> None:
        """Let the time of the present pass count from now, because a prefill before it has ended.

        A pass that was launched behind a prefill does not run before the end of the prefill.
        """
        self._began = self._clock()

    def record(
        self,
        rids: Sequence[str],
        pipeline: str,
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """`commit` a pass, and `account` for it."""
        lost = self.commit(rids, pipeline, proposal, accepted, bonus_ids)
        self.account(rids, proposal, accepted, bonus_ids, lost)

    def commit(
        self,
        rids: Sequence[str],
        pipeline: str,
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
        *,
        whole: DraftTrees | None = None,
    ) -> float:
        """Commit the tokens of a pass that ends now, and measure it.

        `accepted` has the accepted nodes of each tree in order, `bonus_ids` the target's own token
        after them. `whole` are the trees of all requests of the pass; None if `proposal` has all of
        them. Returns the seconds that the pass lost to a sidecar on its device.
        """
        self.end_run()
        if rids and not proposal.unread:
            self._drafts.commit(rids, proposal.trees, accepted, bonus_ids)
        seconds = self._ended()
        return self._observe(rids, pipeline, proposal, accepted, seconds, whole)

    def count_plain(self, rids: Sequence[str], pipeline: str, proposal: Proposal) -> None:
        """Measure a pass that ends now. It has no drafts, and nothing reads its tokens yet.

        Passes of one `proposal` are a run. The statistics get a run as a whole, with `end_run`.
        """
        if self._run is None or self._run.proposal is not proposal:
            self.end_run()
            self._run = _Run(rids, pipeline, proposal)
        self._run.seconds.append(self._ended())

    def end_run(self) -> None:
        """Update all statistics with the passes of `count_plain`. Call it before they are read."""
        run, self._run = self._run, None
        if run is None:
            return
        accepted: Sequence[Sequence[int]] = [()] * len(run.rids)
        for seconds in run.seconds:
            self._observe(run.rids, run.pipeline, run.proposal, accepted, seconds)
            self._drafts.count(run.rids, run.proposal.trees, accepted)
        self._drafts.take_link_seconds()

    def _observe(
        self,
        rids: Sequence[str],
        pipeline: str,
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        seconds: float | None,
        whole: DraftTrees | None = None,
    ) -> float:
        """Update the statistics of times; the arguments and the result are those of `commit`.

        The pass took `seconds`; None if they were not measured.
        """
        trees = proposal.trees
        self._record_time(pipeline, whole or trees, proposal.waited, seconds)
        if not rids:
            return 0.0
        tokens = len(rids) + (sum(map(len, accepted)) if trees.width > 1 else 0)
        self._rows.observe_decode(len(rids), trees.rows, tokens)
        if seconds is None or self._core_use is None:
            return 0.0
        progress = batch_end.progress(self._drafts, rids, accepted) if trees.width > 1 else 1
        self._core_use.observe(trees, accepted, tokens, seconds, progress)
        return self._core_use.lost_seconds(seconds)

    def account(
        self,
        rids: Sequence[str],
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
        lost: float,
    ) -> None:
        """Update all other statistics with a committed pass; `lost` is what `commit` returned."""
        if rids:
            self._drafts.count(rids, proposal.trees, accepted)
            self._update_policies(rids, proposal, accepted, bonus_ids, lost)

    def record_prefill(
        self,
        rids: Sequence[str],
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """Record the drafts that a prefill verified; the arguments are as in `commit`."""
        if not rids:
            return
        self.end_run()
        trees = proposal.trees
        self._drafts.commit(rids, trees, accepted, bonus_ids)
        self._drafts.count(rids, trees, accepted, prefill=True)
        self._learn_first(rids, proposal, accepted, bonus_ids)
        self._drafts.sources.record(
            trees,
            accepted,
            token_seconds=self._rows.token_seconds(max(len(rids), self._drafts.running)),
            extra_seconds=self._rows.row_seconds * (trees.rows - len(trees)),
        )

    def _ended(self) -> float | None:
        """Seconds of the pass that ends now, with its wait; None after an interruption."""
        if self._began is None:
            return None
        began, self._began = self._began, self._clock()
        return self._began - began

    def _record_time(
        self, pipeline: str, trees: DraftTrees, waited: float, measured: float | None
    ) -> None:
        """Record the `measured` time of a pass with its wait; its predicted time if it is None."""
        if measured is None:
            seconds = self.times.seconds(len(trees), trees.rows / len(trees))
        else:
            seconds = measured - waited
            self.times.observe(len(trees), trees.rows / len(trees), seconds)
        self._drafts.totals.note_pass(pipeline, len(trees), trees.rows, seconds, waited)

    def _update_policies(
        self,
        rids: Sequence[str],
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
        lost: float,
    ) -> None:
        """Update the credit of each request, and the gain and cost of each draft source.

        The pass lost `lost` seconds to a sidecar on its device.
        """
        link_seconds = self._drafts.take_link_seconds()
        trees, candidates = proposal.trees, proposal.candidates
        if candidates is None:
            return
        first = self._learn_first(rids, proposal, accepted, bonus_ids)
        sources = self._drafts.sources
        only_replaces_padding = self._runtime.fixed_width and not trees.ragged
        if trees.width > 1:
            plain = self.times.seconds(len(trees), 1)
            extra = self.times.seconds(len(trees), trees.rows / len(trees)) - plain
            sources.record(
                trees,
                accepted,
                token_seconds=plain / len(trees),
                extra_seconds=0.0 if only_replaces_padding else max(0.0, extra),
            )
        else:
            sources.update(candidates, first)
        sidecar = self._drafts.sidecar
        source = sidecar.source if sidecar.lookahead else Source.QUEUE
        sources.observe(source, 0, 0, cost=proposal.waited + link_seconds + lost)

    def _learn_first(
        self,
        rids: Sequence[str],
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> FirstTokens:
        """Update the credit of each request by the first tokens of its larger tree."""
        trees, candidates = proposal.trees, proposal.candidates or proposal.trees
        next_ids = [
            trees.token_ids[row, nodes[0]] if nodes else bonus_ids[row]
            for row, nodes in enumerate(accepted)
        ]
        first = FirstTokens.of(candidates, np.array(next_ids, dtype=np.int32))
        self._drafts.update_credit(rids, candidates, first)
        return first
