"""The speculative worker: verifies draft trees in each decode step.

SGLang's scheduler calls `forward_batch_generation` once per iteration, with a batch to prefill or
to decode. A decode batch takes one target pass, or one pass for each half. The pass verifies draft
trees if the policy chooses drafts; otherwise it is an ordinary decode pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import attention_backends, get_device, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

from sglang_qspec import config
from sglang_qspec.engine import compat, hooks, speculator
from sglang_qspec.engine.cuda import ragged
from sglang_qspec.engine.cuda.backends import pass_cost
from sglang_qspec.engine.cuda.pass_graphs import PassGraphs
from sglang_qspec.engine.failsafe import guarded
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes import (
    batch_split,
    prefill,
    relay,
    sampling_seeds,
    tracing,
    tree_attention,
)
from sglang_qspec.engine.passes.accounting import PassAccounting, Proposal
from sglang_qspec.engine.passes.core_use import CoreUse
from sglang_qspec.engine.passes.grammar import grammar_mask
from sglang_qspec.engine.passes.halves import Halves
from sglang_qspec.engine.passes.opening import speculator_of
from sglang_qspec.engine.passes.outcome import ComingOutcome, ComingTokens
from sglang_qspec.engine.passes.outputs import check_lengths, last_ids_of, outputs_of
from sglang_qspec.engine.passes.penalties import read_outputs
from sglang_qspec.engine.passes.proposer import Proposer
from sglang_qspec.engine.passes.sample import sample_and_accept
from sglang_qspec.engine.passes.settle import PendingPass, Settlement
from sglang_qspec.engine.passes.staging import stage
from sglang_qspec.engine.passes.verify_input import TreeVerifyInput, total_len_of, verify_input_of
from sglang_qspec.engine.requests.runtime_settings import RuntimeSettings
from sglang_qspec.policy import PassTimes, PipelinePlan, PipelineSelector, PrefillRows
from sglang_qspec.trie import DraftTrees
from sglang_qspec.verify.rejection import Proposals

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]
"""Takes the new lengths of a batch."""


class QSpecWorker(BaseSpecWorker):
    """Owns the process's `Speculator`; SGLang owns the target model and its memory."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        compat.check_hooks(hooks.scheduler())
        self._target_worker = target_worker
        self._device = str(get_device().device)
        widest: int = get_spec().speculative_num_draft_tokens
        self._draft_token_num = self.speculative_num_draft_tokens = widest
        settings = config.from_environment()
        backend = attention_backends()[1]
        verification = tree_attention.verification_of(settings, self._device, backend)
        self._runtime = RuntimeSettings.of(settings, widest, ragged=verification.ragged)
        self._graphs = PassGraphs(target_worker.model_runner, settings)
        self._speculator = speculator_of(settings, self._runtime, gpu_id, target_worker)
        self._overlap = not get_schedule().disable_overlap_schedule
        times = PassTimes(pass_cost(self._device))
        rows = PrefillRows(times)
        self._core_use = CoreUse(config.placement(), times, self._speculator)
        self._accounting = PassAccounting(
            self._speculator, self._runtime, times=times, rows=rows, core_use=self._core_use
        )
        self._settlement = Settlement(self._accounting, overlap=self._overlap)
        chains = verification.chains
        self._proposer = Proposer(
            self._speculator, self._runtime, times, chains=chains, shapes=self._graphs
        )
        self._prefills = prefill.PrefillProposer(self._speculator, self._runtime, rows)
        self._selector = PipelineSelector(times)
        self._halves = Halves()
        speculator.activate(self._speculator)
        sampling_seeds.install(reject=settings.acceptance == "reject")

    # The methods that SGLang calls on its NGRAM worker.

    @property
    def draft_worker(self) -> None:
        """None, because the draft model runs in the sidecar."""
        return None

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            self._target_worker.get_memory_pool()
        )

    def init_cuda_graphs(self) -> None:
        """Capture the graphs of further widths. SGLang has already captured its own graphs."""
        self._graphs.capture()

    def clear_cache_pool(self) -> None:
        """Drop all drafts. SGLang calls this for /flush_cache and after weight updates."""
        if self._speculates:
            with guarded("dropping drafts"):
                self._speculator.drop_drafts()

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a prefill or one round of decoding.

        The scheduler restores the fields of `batch` afterwards (forward isolation). The overlap
        scheduler passes `on_publish`. The worker calls `on_publish` with the new lengths int64 [bs]
        once the pass is launched, before the device has computed the lengths.
        """
        if self._overlap:
            stream = torch.get_device_module(self._device).current_stream()
            record_stream_for_v2_verify(batch, None, stream)
        if not batch.forward_mode.is_decode():
            return self._extend(batch, on_publish)
        self._settlement.settle()
        prefill.recover(batch.reqs)
        plan, halves = self._plan(batch)
        if not halves:
            return self._pass(batch, plan, on_publish)
        results = [self._pass(batch_split.take(batch, half), plan) for half in halves]
        return batch_split.join(halves, results)

    def settle(self, result: GenerationBatchResult) -> None:
        """Settle the pass with this result, which the scheduler is about to process."""
        self._settlement.settle_through(result)

    @property
    def _speculates(self) -> bool:
        """Whether speculation is on; an error turns it off."""
        return speculator.active() is not None

    def _plan(self, batch: ScheduleBatch) -> tuple[PipelinePlan, Sequence[Sequence[int]]]:
        """The plan of this round, and the requests of each half; empty unless it is `halves`."""
        plan = PipelinePlan("queue", self._runtime.draft_token_num)
        halves: Sequence[Sequence[int]] = ()
        if self._speculates:
            with guarded("planning a decoding round"):
                self._speculator.poll()
                rids = [req.rid for req in batch.reqs]
                if self._core_use.enter(len(rids), self._runtime):
                    plan = self._choose_plan(batch, rids)
                self._speculator.totals.pipeline = plan.pipeline
                self._speculator.sidecar.lookahead = self._runtime.lookahead(
                    plan.pipeline, plan.width
                )
                if plan.pipeline == "halves":
                    halves = self._halves.split(rids)
        return plan, halves

    def _choose_plan(self, batch: ScheduleBatch, rids: Sequence[str]) -> PipelinePlan:
        """Choose the pipeline and the width of this round.

        `halves` needs a batch that can be split, and step drafts for at least half of the requests.
        It also needs a server without the overlap scheduler, because it reads the tokens of the
        first half in the middle of a round. Otherwise the round uses `ahead`.
        """
        widest = self._runtime.draft_token_num
        plan = PipelinePlan(self._runtime.mode if self._runtime.enabled else "queue", widest)
        if plan.pipeline == "auto":
            plan = self._selector.choose(
                len(rids),
                widest=widest,
                fixed=self._runtime.fixed_width,
                lookahead=self._runtime.step_tokens,
                agreement=self._speculator.totals.agreement,
                step_times=self._speculator.sidecar.step_times,
            )
        if plan.pipeline == "halves" and not (
            not self._overlap
            and len(rids) > 1
            and batch_split.can_split(batch)
            and 2 * self._speculator.sidecar.stepping(rids) >= len(rids)
        ):
            return PipelinePlan("ahead", widest)
        return plan

    def _pass(
        self, batch: ScheduleBatch, plan: PipelinePlan, on_publish: Publish | None = None
    ) -> GenerationBatchResult:
        """Run one pass of the target over a decode batch. Without overlap, also settle the pass."""
        traced = tracing.PassTrace.of(batch.reqs)
        lens = list(map(len, outputs_of(batch.reqs)))
        proposal: Proposal | None = None
        verify_input: TreeVerifyInput | None = None
        if self._speculates:
            with guarded("proposing drafts"):
                total_len = total_len_of(batch)
                self._accounting.begin(None if total_len is None else total_len / len(batch.reqs))
                if self._overlap:
                    check_lengths(batch.reqs, lens, batch.seq_lens_cpu)
                proposal = self._proposer.propose(batch, plan)
                if proposal.trees.width > 1:
                    verify_input = verify_input_of(
                        proposal.trees,
                        batch.seq_lens,
                        batch.device,
                        full_mask=tree_attention.reads_full_mask(self._device),
                        total_len=total_len,
                    )
                if traced is not None and proposal.candidates is not None:
                    traced.look_up(self._speculator)
        trees = proposal.trees if proposal is not None else None
        if trees is None or verify_input is None:
            result = self._decode(batch)
            outcome: ComingOutcome | ComingTokens | None = None
        else:
            result, outcome = self._verify(batch, trees, verify_input)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        outcome = outcome or ComingTokens(result.next_token_ids)
        self._settlement.add(
            PendingPass(batch.reqs, lens, outcome, result, plan.pipeline, proposal, traced)
        )
        if not self._overlap:
            self._settlement.settle()
        return result

    def _extend(
        self, batch: ScheduleBatch, on_publish: Publish | None = None
    ) -> GenerationBatchResult:
        """Run a prefill, which may verify drafts, or an idle batch."""
        drafts: prefill.PrefillDrafts | None = None
        prefill.forget(batch.reqs)
        if self._speculates:
            with guarded("admitting requests"):
                self._speculator.poll()
                self._accounting.interrupt()
                self._core_use.enter_prefill(batch.extend_num_tokens or 0)
                for req in batch.reqs:
                    self._speculator.admit(req.rid)
                drafts = self._prefills.propose(batch)
        lens = list(map(len, outputs_of(batch.reqs)))
        verified = None if drafts is None else self._verify_prefill(batch, drafts)
        if verified is None:
            read_outputs(batch)
            draws = sampling_seeds.seeded_draws(batch, self._proposals(batch))
            with draws, self._prefills.timed(batch):
                result = self._target_worker.forward_batch_generation(batch)
            with guarded("recording token provenance"):
                provenance.extend(batch.reqs)
                tracing.extend(batch.reqs)
            token_ids = result.next_token_ids
            finished = self._finished(result, token_ids, _ones(batch), batch.seq_lens.clone(), 1)
            pending = PendingPass(batch.reqs, lens, ComingTokens(token_ids), finished)
        else:
            assert drafts is not None
            finished, outcome = verified
            pending = PendingPass(batch.reqs, lens, outcome, finished, proposal=drafts.proposal)
        if on_publish is not None:
            on_publish(finished.new_seq_lens)
        if self._overlap or verified is not None:
            self._settlement.add(pending)
        if not self._overlap:
            self._settlement.settle()
        return finished

    def _verify_prefill(
        self, batch: ScheduleBatch, drafts: prefill.PrefillDrafts
    ) -> tuple[GenerationBatchResult, ComingOutcome] | None:
        """Run a prefill that verifies drafts; None if the prefill gave no logits for the drafts."""
        trees, verify_input = drafts.proposal.trees, drafts.verify_input
        whole = prefill.with_drafts(batch, drafts)
        with prefill.logits_at(drafts.rows), self._prefills.timed(whole):
            result = self._target_worker.forward_batch_generation(whole, is_verify=True)
        if len(result.logits_output.next_token_logits) != verify_input.rows:
            return None
        with sampling_seeds.seeded_draws(batch, self._proposals(batch, trees)):
            predict, accept_lens, accept_index = sample_and_accept(
                verify_input, batch, result.logits_output
            )
        outcome = ComingOutcome(predict, accept_lens, accept_index, trees.starts)
        prefill.keep(batch.reqs, outcome)
        tokens = predict[accept_index]
        seq_lens = batch.seq_lens + accept_lens - 1
        finished = self._finished(result, tokens, accept_lens, seq_lens, 1)
        # SGLang adds one token of a prefill; `prefill.commit` adds the others.
        finished.next_token_ids = tokens[:, 0].contiguous()
        finished.accept_lens = _ones(batch)
        return finished, outcome

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run an ordinary decode pass, which gives one token for each request."""
        bs = len(batch.reqs)
        if self._overlap:
            batch.input_ids = relay.last_ids(batch)
        else:
            (batch.input_ids,) = stage(batch.device, last_ids_of(batch.reqs))
        batch.out_cache_loc = batch.req_to_token_pool.req_to_token[
            batch.req_pool_indices, batch.seq_lens
        ].to(torch.int64)
        batch.spec_info = None
        batch.seq_lens = batch.seq_lens + 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.seq_lens_sum = None
        read_outputs(batch)
        with sampling_seeds.seeded_draws(batch, self._proposals(batch)):
            result = self._run(batch, 1)
        logits = result.logits_output
        if batch.return_logprob and logits.next_token_logprobs is not None:
            logits.next_token_logprobs = logits.next_token_logprobs.view(bs, 1)
        return self._finished(result, result.next_token_ids, _ones(batch), batch.seq_lens, 1)

    def _run(self, batch: ScheduleBatch, width: int) -> GenerationBatchResult:
        """Run the target over at most `width` tokens of each request; only a plain pass samples."""
        rows = len(batch.input_ids)
        with self._graphs.at(width), ragged.padded(batch, self._graphs.tiers):
            result = self._target_worker.forward_batch_generation(batch, is_verify=width > 1)
        ragged.cut(result.logits_output, rows)
        self._speculator.totals.eager_passes += not result.can_run_cuda_graph
        return result

    def _verify(
        self, batch: ScheduleBatch, trees: DraftTrees, verify_input: TreeVerifyInput
    ) -> tuple[GenerationBatchResult, ComingOutcome]:
        """Run a verify pass. Returns its result, and the outcome, which the host can read later."""
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = verify_input.input_ids
        batch.out_cache_loc = verify_input.slots(batch)
        batch.spec_info = verify_input
        result = self._run(batch, trees.width)
        allowed = grammar_mask(batch, trees, verify_input)
        with sampling_seeds.seeded_draws(batch, self._proposals(batch, trees)):
            predict, accept_lens, accept_index = sample_and_accept(
                verify_input, batch, result.logits_output, allowed
            )
        outcome = ComingOutcome(predict, accept_lens, accept_index, trees.starts)
        # With overlap the host does not know the accepted paths yet.
        if not trees.are_chains if self._overlap else not outcome.read().is_prefix:
            verify_input.move_accepted(batch, accept_index, self.token_to_kv_pool_allocator)
        if batch.return_logprob:
            compute_spec_logprobs(batch, result.logits_output, predict, accept_index=accept_index)
        if result.logits_output.hidden_states is not None:
            # The scheduler reads one row per accepted token; verification has one per node.
            rows = accept_index.flatten().clamp(min=0)
            result.logits_output.hidden_states = result.logits_output.hidden_states[rows]
        tokens = predict[accept_index].flatten()
        seq_lens = batch.seq_lens + accept_lens
        return self._finished(result, tokens, accept_lens, seq_lens, trees.width), outcome

    def _finished(
        self,
        result: GenerationBatchResult,
        token_ids: torch.Tensor,
        accept_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        width: int,
    ) -> GenerationBatchResult:
        """The result of a pass, with what the next pass needs (`batch_split.finished`)."""
        widest = self._draft_token_num
        return batch_split.finished(
            result.logits_output,
            token_ids,
            accept_lens,
            seq_lens,
            width,
            can_run_cuda_graph=result.can_run_cuda_graph,
            relay=relay.relayed(token_ids, accept_lens, seq_lens, widest)
            if self._overlap
            else None,
        )

    def _proposals(self, batch: ScheduleBatch, trees: DraftTrees | None = None) -> Proposals | None:
        """Proposals at the nodes of a pass for rejection sampling; at the roots without `trees`."""
        proposals = None
        if self._speculates:
            with guarded("looking up draft probabilities"):
                rids = [req.rid for req in batch.reqs]
                outputs = outputs_of(batch.reqs)
                proposals = self._speculator.step_proposals.proposals(rids, outputs, trees)
        return proposals


def _ones(batch: ScheduleBatch) -> torch.Tensor:
    return torch.ones(len(batch.reqs), dtype=torch.int32, device=batch.device)
