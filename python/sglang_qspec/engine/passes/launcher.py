"""Launches passes: runs the target, samples its tokens, and accepts draft tokens.

Each method fills in the outcome and the result of a `Pass`. The host does not wait for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.cuda import ragged
from sglang_qspec.engine.cuda.pass_graphs import PassGraphs
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes import prefill_tokens, tracing
from sglang_qspec.engine.passes.launch import batch_split, prefill, prefill_hooks
from sglang_qspec.engine.passes.launch.verify_input import TreeVerifyInput
from sglang_qspec.engine.passes.leader import Leader
from sglang_qspec.engine.passes.lineup import Lineup
from sglang_qspec.engine.passes.outcome import ComingOutcome, ComingTokens
from sglang_qspec.engine.passes.outputs import last_ids_of
from sglang_qspec.engine.passes.sample.grammar import grammar_mask
from sglang_qspec.engine.passes.sample.penalties import read_outputs
from sglang_qspec.engine.passes.sample.sample import sample_and_accept
from sglang_qspec.engine.passes.sample.seeds import seeded_draws
from sglang_qspec.engine.passes.states import ComingStates, TargetStates
from sglang_qspec.engine.passes.target_pass import Pass
from sglang_qspec.transfers import to_device
from sglang_qspec.trie import DraftTrees

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.speculative.spec_utils import GrammarMask


class Launcher:
    """Runs the target model of one rank."""

    def __init__(
        self,
        target_worker: TpModelWorker,
        graphs: PassGraphs,
        leader: Leader | None,
        *,
        overlap: bool,
        states: TargetStates | None = None,
    ) -> None:
        """`leader` is None on ranks after rank 0, and `states` unless the sidecar runs a head."""
        self._target_worker = target_worker
        self._graphs = graphs
        self._leader = leader
        self._overlap = overlap
        self._states = states
        self._all_ones: dict[int, torch.Tensor] = {}
        """What `_ones` has returned, by batch size."""

    def plain(self, decided: Pass) -> None:
        """Launch an ordinary decode pass, which gives one token for each request."""
        batch = decided.batch
        if self._overlap:
            batch.input_ids = batch.spec_info.accept_tokens
        else:
            (batch.input_ids,) = to_device(batch.device, last_ids_of(batch.reqs))
        batch.out_cache_loc = batch.req_to_token_pool.req_to_token[
            batch.req_pool_indices, batch.seq_lens
        ].to(torch.int64)
        batch.spec_info = None
        batch.seq_lens = batch.seq_lens + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        if decided.early is not None:
            after = decided.early.known.after
            batch.seq_lens_cpu, batch.seq_lens_sum = after.seq_lens, after.total
        else:
            if batch.seq_lens_cpu is not None:
                batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            batch.seq_lens_sum = None  # SGLang computes it
        read_outputs(batch)
        with self._draws(batch, lineup=None if decided.early is None else decided.early.lineup):
            result = self._run(batch, 1)
        with guarded("copying hidden states"):
            if (states := self._states_of(result, len(batch.reqs))) is not None:
                decided.states = ComingStates(states, range(len(batch.reqs)), decided.begins)
        logits = result.logits_output
        if batch.return_logprob and logits.next_token_logprobs is not None:
            logits.next_token_logprobs = logits.next_token_logprobs.view(len(batch.reqs), 1)
        token_ids, ones = result.next_token_ids, self._ones(batch)
        decided.result = self._finished(result, token_ids, ones, batch.seq_lens, 1)
        decided.outcome = ComingTokens(decided.result, copied=self._overlap)

    def verify(self, decided: Pass, verify_input: TreeVerifyInput) -> None:
        """Launch a pass over the trees of `decided`."""
        batch, trees = decided.batch, decided.trees
        assert trees is not None
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = verify_input.input_ids
        batch.out_cache_loc = verify_input.slots(batch)
        batch.spec_info = verify_input
        result = self._run(batch, trees.width)
        allowed = grammar_mask(batch, trees, verify_input)
        logits = result.logits_output
        outcome = self._accept(batch, trees, verify_input, logits, allowed)
        predict, accept_lens, accept_index = (
            outcome.predict,
            outcome.accept_lens,
            outcome.accept_index,
        )
        decided.outcome = outcome
        with guarded("copying hidden states"):
            if (states := self._states_of(result, len(verify_input.input_ids))) is not None:
                firsts = range(0, accept_index.numel(), accept_index.shape[1])
                chosen = states[accept_index.flatten().clamp(min=0)]
                decided.states = ComingStates(chosen, firsts, decided.begins)
        # With overlap the host does not know the accepted paths yet.
        if not trees.are_chains if self._overlap else not outcome.read().is_prefix:
            allocator = self._target_worker.get_memory_pool()[1]
            verify_input.move_accepted(batch, accept_index, allocator)
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits, predict, accept_index=accept_index)
        if logits.hidden_states is not None:
            # The scheduler reads one row per accepted token; verification has one per node.
            logits.hidden_states = logits.hidden_states[accept_index.flatten().clamp(min=0)]
        tokens, seq_lens = predict[accept_index].flatten(), batch.seq_lens + accept_lens
        decided.result = self._finished(result, tokens, accept_lens, seq_lens, trees.width)

    def plain_prefill(self, launched: Pass) -> None:
        """Launch a prefill without drafts, or an idle batch."""
        batch = launched.batch
        read_outputs(batch)
        if self._states is not None:
            self._states.begin()
        with self._draws(batch), self._timed(batch):
            result = self._target_worker.forward_batch_generation(batch)
        rows = batch.extend_num_tokens or 0
        with guarded("copying hidden states"):
            if rows and (states := self._states_of(result, rows)) is not None:
                counts = list(batch.extend_lens)
                firsts = [0, *accumulate(counts)][:-1]
                launched.states = ComingStates(states, firsts, list(batch.prefix_lens), counts)
        with guarded("recording token provenance"):
            provenance.extend(batch.reqs)
            tracing.extend(batch.reqs)
        token_ids, seq_lens = result.next_token_ids, batch.seq_lens.clone()
        launched.result = self._finished(result, token_ids, self._ones(batch), seq_lens, 1)
        launched.outcome = ComingTokens(launched.result, copied=self._overlap)

    def verify_prefill(self, launched: Pass, drafts: prefill.PrefillDrafts) -> bool:
        """Launch a prefill that verifies drafts.

        Returns False if the prefill gave no logits for the drafts, and has to be repeated.
        """
        batch, verify_input = launched.batch, drafts.verify_input
        whole = prefill.with_drafts(batch, drafts)
        with prefill_hooks.logits_at(drafts.rows), self._timed(whole):
            result = self._target_worker.forward_batch_generation(whole, is_verify=True)
        if len(result.logits_output.next_token_logits) != verify_input.rows:
            return False
        trees = drafts.proposal.trees
        outcome = self._accept(batch, trees, verify_input, result.logits_output)
        launched.outcome, launched.proposal = outcome, drafts.proposal
        prefill_tokens.keep(batch.reqs, outcome)
        tokens, accept_lens = outcome.predict[outcome.accept_index], outcome.accept_lens
        finished = self._finished(result, tokens, accept_lens, batch.seq_lens + accept_lens - 1, 1)
        # SGLang adds one token of a prefill; `prefill_tokens.commit` adds the others.
        finished.next_token_ids = tokens[:, 0].contiguous()
        finished.accept_lens = self._ones(batch)
        launched.result = finished
        return True

    def _run(self, batch: ScheduleBatch, width: int) -> GenerationBatchResult:
        """Run the target over at most `width` tokens of each request; only a plain pass samples."""
        rows = len(batch.input_ids)
        if self._states is not None:
            self._states.begin()
        with self._graphs.at(width), ragged.padded(batch, self._graphs.tiers):
            result = self._target_worker.forward_batch_generation(batch, is_verify=width > 1)
        ragged.cut(result.logits_output, rows)
        if self._leader is not None:
            self._leader.note_eager(eager=not result.can_run_cuda_graph)
        return result

    def _states_of(self, result: GenerationBatchResult, rows: int) -> torch.Tensor | None:
        """The states of the first `rows` rows of the last pass for a head, on rank 0."""
        if self._states is None:
            return None
        return self._states.take(rows, replayed=result.can_run_cuda_graph)

    def _accept(
        self,
        batch: ScheduleBatch,
        trees: DraftTrees,
        verify_input: TreeVerifyInput,
        logits: LogitsProcessorOutput,
        allowed: GrammarMask | None = None,
    ) -> ComingOutcome:
        """Sample the target's tokens at the nodes of `trees`, and accept draft tokens."""
        with self._draws(batch, trees):
            accepted = sample_and_accept(verify_input, batch, logits, allowed)
        return ComingOutcome(*accepted, trees.starts)

    def _draws(
        self,
        batch: ScheduleBatch,
        trees: DraftTrees | None = None,
        *,
        lineup: Lineup | None = None,
    ) -> AbstractContextManager[None]:
        """A context that samples with seeds, and on rank 0 with proposals for rejection sampling.

        The other ranks get the tokens of rank 0.
        """
        proposals = None if self._leader is None else self._leader.proposals(batch, trees)
        return seeded_draws(batch, proposals, lineup)

    def _timed(self, batch: ScheduleBatch) -> AbstractContextManager[None]:
        """A context that measures a prefill on rank 0."""
        return nullcontext() if self._leader is None else self._leader.timed(batch)

    def _finished(
        self,
        result: GenerationBatchResult,
        token_ids: torch.Tensor,
        accept_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        width: int,
    ) -> GenerationBatchResult:
        """The result of a pass, with what the next pass needs (`batch_split.finished`)."""
        return batch_split.finished(
            result.logits_output,
            token_ids,
            accept_lens,
            seq_lens,
            width,
            can_run_cuda_graph=result.can_run_cuda_graph,
        )

    def _ones(self, batch: ScheduleBatch) -> torch.Tensor:
        """int32 [bs]: the accept lengths of a pass without drafts; do not change them.

        With overlap SGLang needs them on the host alone.
        """
        count = len(batch.reqs)
        if count not in self._all_ones:
            device = "cpu" if self._overlap else batch.device
            self._all_ones[count] = torch.ones(count, dtype=torch.int32, device=device)
        return self._all_ones[count]
