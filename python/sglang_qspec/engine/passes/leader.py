"""What rank 0 decides about the passes of the target: plans, drafts, halves, CPUs and statistics.

A target of several ranks has one `Leader`. The other ranks get its decisions as `PassOrder`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.cuda.backends import pass_cost
from sglang_qspec.engine.passes import tracing
from sglang_qspec.engine.passes.decide.accounting import PassAccounting
from sglang_qspec.engine.passes.decide.core_use import CoreUse
from sglang_qspec.engine.passes.decide.halves import Halves
from sglang_qspec.engine.passes.decide.proposer import Proposer, Shapes
from sglang_qspec.engine.passes.decide.rounds import Rounds
from sglang_qspec.engine.passes.decide.standing import StandingPlan
from sglang_qspec.engine.passes.launch import batch_split, decode, prefill
from sglang_qspec.engine.passes.launch.verify_input import total_len_of
from sglang_qspec.engine.passes.lineup import Lineup
from sglang_qspec.engine.passes.outputs import outputs_of
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.passes.target_pass import EarlyPass, Pass
from sglang_qspec.engine.placement import environment
from sglang_qspec.engine.ranks import PassOrder
from sglang_qspec.engine.sidecar.startup import open_links
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import PassTimes, PipelinePlan, PrefillRows
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees, TrieLimits, TrieStore
from sglang_qspec.verify.rejection import Proposals

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def speculator_of(
    settings: QSpecConfig, runtime: RuntimeSettings, gpu_id: int, vocab_size: int
) -> Speculator:
    """A speculator with its tries and its links. Raises LinkError if a sidecar refuses the target.

    `vocab_size` is the target's number of token ids.
    """
    limits = TrieLimits(
        vocab_size=vocab_size,
        max_request_tokens=settings.max_request_tokens,
        max_total_tokens=settings.max_total_tokens,
    )
    opened = open_links(settings, gpu_id)
    return Speculator(settings, vocab_size, TrieStore(limits), opened, runtime_settings=runtime)


MAX_LAG = 64
"""Passes without drafts after which the server commits their tokens, if nothing needs the tokens
earlier."""
LONG_MATCH = 8
"""Length of a match, in tokens, behind which a draft from a text is nearly always right."""


class Leader:
    """Owns the process's `Speculator` and the policies of its passes."""

    def __init__(
        self,
        active: Speculator,
        runtime: RuntimeSettings,
        shapes: Shapes,
        device: str,
        *,
        chains: bool,
        overlap: bool,
    ) -> None:
        """`chains` restricts trees to chains; `overlap` is SGLang's overlap scheduler."""
        self.speculator = active
        self._runtime = runtime
        self._overlap = overlap
        times = PassTimes(pass_cost(device))
        rows = PrefillRows(times)
        self._core_use = CoreUse(environment.read(), times, active)
        self.accounting = PassAccounting(
            active, runtime, times=times, rows=rows, core_use=self._core_use
        )
        self._proposer = Proposer(active, runtime, times, chains=chains, shapes=shapes)
        self._prefills = prefill.PrefillProposer(active, runtime, rows)
        self._rounds = Rounds(active, runtime, times)
        self._halves = Halves()
        self._planned: tuple[PipelinePlan, Sequence[Sequence[int]]] | None = None
        """The plan of the next round, if `early` has made it."""
        self._standing: StandingPlan | None = None
        """The decision on the passes without drafts over the latest lineup."""
        self._unread = 0
        """Number of passes without drafts since the last commit of tokens."""
        self._lineup = Lineup([])
        """The requests of the last pass, without overlap."""
        active.complete = lambda: self.accounting.end_run()
        speculation.activate(active)

    def passes(self, batch: ScheduleBatch) -> Iterator[Pass]:
        """The passes of a decode round: one, or one for each half of the batch.

        The second pass is decided after the first one has run. Without overlap one decision stands
        for several passes without drafts; with overlap these are early.
        """
        if self._speculates:
            with guarded("receiving drafts"):
                self.speculator.poll()
        if not self._overlap and (repeated := self._repeated(batch)) is not None:
            yield repeated
            return
        plan, halves = self._planned or self._plan(batch, Lineup(batch.reqs))
        self._planned, self._standing, self._unread = None, None, 0
        parts: Sequence[Sequence[int] | None] = halves or (None,)
        for number, rows in enumerate(parts, 1):
            part = batch if rows is None else batch_split.take(batch, rows)
            traced = tracing.PassTrace.of(part.reqs)
            proposal = self._propose(part, plan, traced)
            trees = None if proposal is None or proposal.trees.width == 1 else proposal.trees
            order = PassOrder(trees, rows, number == len(parts), self._speculates)
            yield Pass(part, order, plan.pipeline, proposal, traced)

    def early(self, batch: ScheduleBatch, early: EarlyPass) -> Pass | None:
        """A plain pass that does not depend on the tokens of the last pass; None if drafts may pay.

        One decision stands for several early passes, unless a sidecar reads their tokens.
        """
        lineup = early.lineup
        if not _is_independent(batch, lineup):
            return None
        stands = self._stands(batch, lineup, early.known.total)
        if stands is None:
            return None
        self.speculator.totals.early_passes += 1
        return Pass(batch, stands.order, stands.pipeline, stands.proposal, early=early)

    def _repeated(self, batch: ScheduleBatch) -> Pass | None:
        """A pass without drafts that is decided like the last one; None if drafts may pay."""
        lineup = self._lineup = self._lineup.of(batch.reqs)
        if lineup.has_traces:
            return None
        stands = self._stands(batch, lineup, total_len_of(batch))
        if stands is None:
            return None
        return Pass(batch, stands.order, stands.pipeline, stands.proposal)

    def _stands(
        self, batch: ScheduleBatch, lineup: Lineup, total_len: int | None
    ) -> StandingPlan | None:
        """The decision on the next pass if it stands for several passes without drafts.

        `total_len` is the length of all texts without their last tokens, if it is known. The tokens
        of these passes are committed later.
        """
        stands = self._standing
        arrivals, speculates = self.speculator.arrivals, self._speculates
        if (
            stands is None
            or self._reads
            or not stands.holds(lineup, self._runtime, arrivals, speculates=speculates)
        ):
            stands = self._standing = self._plan_plain(batch, lineup, total_len)
            if stands is None:
                return None
        if stands.proposal is not None and speculates:
            with guarded("following a plain pass"):
                self._follow(lineup, reads=not stands.proposal.unread)
        return stands

    def _plan_plain(
        self, batch: ScheduleBatch, lineup: Lineup, total_len: int | None
    ) -> StandingPlan | None:
        """Decide on passes without drafts over a lineup; None if the next one may have drafts.

        Unless a sidecar that makes step drafts reads the committed tokens, nothing needs them
        before the next pass with drafts, so they are `unread`.
        """
        proposal = None
        self._planned = self._plan(batch, lineup)
        plan, _ = self._planned
        if self._speculates:
            with guarded("planning a plain pass"):
                if self._may_draft(lineup, plan) or (self._reads and self._unread):
                    return None  # drafts, or the tokens of the last passes, come first
                context = None if total_len is None else 1 + total_len / len(lineup.rids)
                self.accounting.begin(context)
                # With overlap the roots are tokens that the host does not know.
                roots = DraftTrees.roots(len(lineup.rids))
                proposal = Proposal(roots, unread=not self._reads)
        self._planned = None
        return StandingPlan(
            lineup,
            replace(self._runtime),
            self.speculator.arrivals,
            PassOrder(speculates=self._speculates),
            plan.pipeline,
            proposal,
        )

    def _follow(self, lineup: Lineup, *, reads: bool) -> None:
        """Commit the tokens before a pass without drafts, or count them as unread."""
        self._unread = 0 if reads else self._unread + 1
        if reads or not self._unread % MAX_LAG:
            self.speculator.follow(lineup.rids, outputs_of(lineup.reqs))

    @property
    def _reads(self) -> bool:
        """Whether a sidecar makes step drafts, so that it reads the committed tokens."""
        sidecar = self.speculator.sidecar
        return bool(self._speculates and sidecar.lookahead and sidecar.ready)

    def _may_draft(self, lineup: Lineup, plan: PipelinePlan) -> bool:
        """Whether the pass over `lineup` may have drafts, or needs the tokens of the last pass."""
        rejects = self.speculator.settings.acceptance == "reject"  # reads the drafts at the roots
        reads = rejects or (self._runtime.enabled and plan.width > 1)
        return reads and any(self.speculator.live(rid) is not None for rid in lineup.rids)

    def prepare_prefill(self, batch: ScheduleBatch) -> prefill.PrefillDrafts | None:
        """Admit the requests of a prefill, and choose its drafts; None for no drafts."""
        if self._speculates:
            with guarded("admitting requests"):
                self.speculator.poll()
                self._standing = None
                self.accounting.interrupt()
                self._core_use.enter_prefill(batch.extend_num_tokens or 0)
                for req in batch.reqs:
                    self.speculator.admit(req.rid)
                return self._prefills.propose(batch)
        return None

    def timed(self, batch: ScheduleBatch) -> AbstractContextManager[None]:
        """A context that measures a prefill."""
        return self._prefills.timed(batch)

    def note_eager(self, *, eager: bool) -> None:
        """Note whether a decode pass ran without a CUDA graph."""
        self.speculator.totals.eager_passes += eager

    def drop_drafts(self) -> None:
        """Drop all drafts, because the target or its cache has changed."""
        if self._speculates:
            with guarded("dropping drafts"):
                self.speculator.drop_drafts()

    def change_endpoints(self, endpoints: Sequence[str]) -> None:
        """Use the sidecars at these addresses, and no others."""
        if self._speculates:
            with guarded("changing the endpoints"):
                self.speculator.sidecar.change(endpoints)

    def proposals(self, batch: ScheduleBatch, trees: DraftTrees | None) -> Proposals | None:
        """Proposals at the nodes of a pass for rejection sampling; at the roots without `trees`."""
        if self._speculates and len(self.speculator.step_proposals):
            with guarded("looking up draft probabilities"):
                rids = [req.rid for req in batch.reqs]
                steps = self.speculator.step_proposals
                return steps.proposals(rids, outputs_of(batch.reqs), trees)
        return None

    @property
    def _speculates(self) -> bool:
        """Whether speculation is on; an error turns it off."""
        return speculation.active() is not None

    def _plan(
        self, batch: ScheduleBatch, lineup: Lineup
    ) -> tuple[PipelinePlan, Sequence[Sequence[int]]]:
        """The plan of this round, and the requests of each half; empty unless it is `halves`."""
        plan = PipelinePlan("queue", self._runtime.draft_token_num)
        halves: Sequence[Sequence[int]] = ()
        if self._speculates:
            with guarded("planning a decoding round"):
                self.accounting.end_run()
                rids = lineup.rids
                splits = partial(self._splits, batch, rids)
                proposed = self._rounds.propose(len(rids), splits=splits)
                promised = partial(self._promises, rids)
                texts = int(lineup.prompt_lens.sum())
                # A batch of some sizes has no room for drafts.
                widest = self._proposer.widest(len(rids), self._runtime.draft_token_num)
                use = self._core_use.enter(
                    len(rids),
                    self._runtime,
                    lineup.kind,
                    proposed,
                    promised,
                    texts,
                    room=widest > 1,
                )
                plan = self._rounds.begin(
                    len(rids),
                    splits=splits,
                    use=use,
                    keeps_drafting=self._core_use.keeps_drafting,
                )
                if plan.pipeline == "halves":
                    halves = self._halves.split(rids)
        if not self._speculates:
            with guarded("giving the target all CPUs"):
                self._core_use.leave()
        return plan, halves

    def _promises(self, rids: Sequence[str]) -> bool:
        """Whether drafts from texts would have been right for at least half of the requests.

        So it is if the last tokens of a request are a long match, as those of an answer are that
        came as a guess.
        """
        paused = self.speculator.sources.paused
        lives = [live for rid in rids if (live := self.speculator.live(rid)) is not None]
        matches = [live.trie.longest_match(paused) >= LONG_MATCH for live in lives]
        return 2 * sum(matches) >= len(rids)

    def _splits(self, batch: ScheduleBatch, rids: Sequence[str]) -> bool:
        """Whether the round can be served in halves.

        `halves` needs a batch that can be split, and step drafts for at least half of the requests.
        It also needs a server without the overlap scheduler, because it reads the tokens of the
        first half in the middle of a round.
        """
        return (
            not self._overlap
            and len(rids) > 1
            and batch_split.can_split(batch)
            and 2 * self.speculator.sidecar.stepping(rids) >= len(rids)
        )

    def _propose(
        self, batch: ScheduleBatch, plan: PipelinePlan, traced: tracing.PassTrace | None
    ) -> Proposal | None:
        """Choose the drafts of a pass; None if speculation has ended."""
        if self._speculates:
            with guarded("proposing drafts"):
                total_len = total_len_of(batch)
                self.accounting.begin(None if total_len is None else total_len / len(batch.reqs))
                proposal = decode.propose(self._proposer, self.speculator, batch, plan)
                if traced is not None and proposal.candidates is not None:
                    traced.look_up(self.speculator)
                return proposal
        return None


def _is_independent(batch: ScheduleBatch, lineup: Lineup) -> bool:
    """Whether a plain pass needs nothing that follows from the tokens of the last pass on the host.

    Grammars, penalties, custom processors and traces do. SGLang may count the tokens of images
    differently.
    """
    info = batch.sampling_info
    return not (
        batch.has_grammar
        or info.has_custom_logit_processor
        or info.penalizer_orchestrator.is_required
        or lineup.has_images
        or lineup.has_traces
    )
