"""The speculative worker: verifies draft trees in each decode step.

SGLang's scheduler calls `forward_batch_generation` once per iteration, with a batch to prefill or
to decode. A decode batch takes one target pass, or one pass for each half. The pass verifies draft
trees if the policy chooses drafts; otherwise it is an ordinary decode pass. Every rank of the
target has a worker; `passes.lead` decides the passes on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import (
    attention_backends,
    get_device,
    get_exec,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

from sglang_qspec import config
from sglang_qspec.engine import speculator
from sglang_qspec.engine.boundary import failsafe, installed
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.cuda import ragged
from sglang_qspec.engine.cuda.pass_graphs import PassGraphs
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes.launch import batch_split, prefill, relay, tree_attention
from sglang_qspec.engine.passes.launch.verify_input import (
    TreeVerifyInput,
    total_len_of,
    verify_input_of,
)
from sglang_qspec.engine.passes.lead import Decision, Lead, speculator_of
from sglang_qspec.engine.passes.outcome import ComingOutcome, ComingTokens
from sglang_qspec.engine.passes.outputs import (
    check_lengths,
    last_ids_of,
    outputs_of,
)
from sglang_qspec.engine.passes.sample import grammar
from sglang_qspec.engine.passes.sample import seeds as sampling_seeds
from sglang_qspec.engine.passes.sample.penalties import read_outputs
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.engine.passes.settle import tracing
from sglang_qspec.engine.passes.settle.settlement import PendingPass, Settlement
from sglang_qspec.engine.passes.staging import stage
from sglang_qspec.engine.ranks import PassOrder, RankGroup
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees
from sglang_qspec.verify.rejection import Proposals

Publish = Callable[[torch.Tensor], None]
"""Takes the new lengths of a batch."""


class QSpecWorker(BaseSpecWorker):
    """Runs the passes of one rank; SGLang owns the target model and its memory."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        installed.check("scheduler")
        self._target_worker = target_worker
        self._device = str(get_device().device)
        widest: int = get_spec().speculative_num_draft_tokens
        self._draft_token_num = self.speculative_num_draft_tokens = widest
        settings = config.from_environment()
        self.endpoints = settings.endpoints
        """Addresses of the sidecars that others run; equal on all ranks."""
        backend = attention_backends()[1]
        verification = tree_attention.verification_of(settings, self._device, backend)
        self._ranks = RankGroup(get_parallel().tp_group)
        self._runtime = RuntimeSettings.of(settings, widest, ragged=verification.ragged)
        self._graphs = PassGraphs(target_worker.model_runner, settings)
        self._overlap = not get_schedule().disable_overlap_schedule
        self._lead: Lead | None = None
        """Decides the passes; None on ranks after rank 0."""
        if self._ranks.rank == 0:
            self._lead = Lead(
                speculator_of(
                    settings, self._runtime, gpu_id, target_worker.model_config.vocab_size
                ),
                self._runtime,
                self._graphs,
                self._device,
                chains=verification.chains,
                overlap=self._overlap,
            )
        accounting = None if self._lead is None else self._lead.accounting
        self._settlement = Settlement(accounting, overlap=self._overlap)
        sampling_seeds.install(reject=settings.acceptance == "reject")
        grammar.install(get_exec().kernel.grammar_backend)

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
        if self._lead is not None:
            self._lead.drop_drafts()

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
        rows: list[Sequence[int]] = []
        results = []
        for decision in self._decisions(batch):
            results.append(self._pass(decision, on_publish))
            rows.append(decision.order.rows or ())
        return results[0] if len(results) == 1 else batch_split.join(rows, results)

    @property
    def speculates(self) -> bool:
        """Whether speculation goes on; equal on all ranks between two rounds."""
        return self._ranks.speculates if self._ranks.size > 1 else not speculator.failed()

    def change_endpoints(self, endpoints: tuple[str, ...]) -> None:
        """Use the sidecars at these addresses, and no others, from now on."""
        self.endpoints = endpoints
        if self._lead is not None:
            self._lead.change_endpoints(endpoints)

    def settle(self, result: GenerationBatchResult) -> None:
        """Settle the pass with this result, which the scheduler is about to process."""
        self._settlement.settle_through(result)

    def _decisions(self, batch: ScheduleBatch) -> Iterator[Decision]:
        """The passes of a decode round, the same ones on all ranks."""
        ordered = self._ranks.begin_round()
        if self._lead is not None:
            for decision in self._lead.decisions(batch):
                self._ranks.send(decision.order)
                yield decision
            return
        order = PassOrder(last=False)
        while not order.last:
            order = self._ranks.receive() if ordered else PassOrder()
            part = batch if order.rows is None else batch_split.take(batch, order.rows)
            yield Decision(part, order)

    def _pass(self, decision: Decision, on_publish: Publish | None) -> GenerationBatchResult:
        """Run one pass of the target over a decode batch. Without overlap, also settle the pass."""
        batch, trees = decision.batch, decision.order.trees
        lens = list(map(len, outputs_of(batch.reqs)))
        if self._overlap or self._ranks.size > 1:
            with guarded("comparing the lengths of outputs"):
                check_lengths(batch.reqs, lens, batch.seq_lens_cpu)
        verify_input = None if trees is None else self._verify_input(batch, trees)
        if trees is None or verify_input is None:
            result = self._decode(batch)
            outcome: ComingOutcome | ComingTokens = ComingTokens(result.next_token_ids)
        else:
            result, outcome = self._verify(batch, trees, verify_input)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._settlement.add(
            PendingPass(
                batch.reqs,
                lens,
                outcome,
                result,
                decision.pipeline,
                decision.proposal,
                decision.traced,
            )
        )
        if not self._overlap:
            self._settlement.settle()
        return result

    def _verify_input(self, batch: ScheduleBatch, trees: DraftTrees) -> TreeVerifyInput | None:
        """Build the input of a pass with drafts; None on all ranks if speculation failed on one."""
        built = None
        with guarded("preparing a pass with drafts"):
            built = verify_input_of(
                trees,
                batch.seq_lens,
                batch.device,
                full_mask=tree_attention.reads_full_mask(self._device),
                total_len=total_len_of(batch),
            )
        dissenter = self._ranks.dissenter(agrees=not speculator.failed())
        if dissenter is None:
            return built
        failsafe.follow(dissenter)
        return None

    def _extend(
        self, batch: ScheduleBatch, on_publish: Publish | None = None
    ) -> GenerationBatchResult:
        """Run a prefill, which may verify drafts, or an idle batch."""
        prefill.forget(batch.reqs)
        drafts = None if self._lead is None else self._lead.prepare_prefill(batch)
        lens = list(map(len, outputs_of(batch.reqs)))
        verified = None if drafts is None else self._verify_prefill(batch, drafts)
        if verified is None:
            read_outputs(batch)
            draws = sampling_seeds.seeded_draws(batch, self._proposals(batch))
            with draws, self._timed(batch):
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
        with prefill.logits_at(drafts.rows), self._timed(whole):
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
        if self._lead is not None:
            self._lead.note_eager(eager=not result.can_run_cuda_graph)
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
        allowed = grammar.grammar_mask(batch, trees, verify_input)
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
        """Proposals for rejection sampling; None on other ranks, which get the tokens of rank 0."""
        return None if self._lead is None else self._lead.proposals(batch, trees)

    def _timed(self, batch: ScheduleBatch) -> AbstractContextManager[None]:
        """A context that measures a prefill on rank 0."""
        return nullcontext() if self._lead is None else self._lead.timed(batch)


def _ones(batch: ScheduleBatch) -> torch.Tensor:
    return torch.ones(len(batch.reqs), dtype=torch.int32, device=batch.device)
