"""The speculative worker: each decode step, draft trees in and verified tokens out.

SGLang's scheduler calls `forward_batch_generation` once per iteration with a batch that is either
being prefilled or decoding. A decoding batch takes one target pass: over draft trees if any request
has one, otherwise an ordinary decode pass.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_device, get_spec
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    move_accept_tokens_to_target_kvcache,
)

from sglang_qspec import config
from sglang_qspec.budget import Patience, WidthPolicy
from sglang_qspec.engine import compat, speculator, touched
from sglang_qspec.engine.cpu.sample import cpu_eagle_sample
from sglang_qspec.engine.startup import open_speculator
from sglang_qspec.engine.verify_input import verify_input_of
from sglang_qspec.trie import DraftTrees, TreeLayout

logger = logging.getLogger(__name__)


class QSpecWorker(BaseSpecWorker):
    """Owns the process's `Speculator`; the target's model and memory are SGLang's."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        compat.check_hooks(touched.HOOKED_IN_SCHEDULER)
        self._target_worker = target_worker
        self._on_cpu = str(get_device().device).startswith("cpu")
        self._draft_token_num: int = get_spec().speculative_num_draft_tokens
        self.speculative_num_draft_tokens = self._draft_token_num
        self._width = WidthPolicy(self._draft_token_num, fixed=not self._on_cpu)
        self._patience = Patience()
        self._pass_ended: float | None = None
        """When the last decode pass did, if there was nothing after it."""
        self._waited = 0.0
        """Seconds since then that were spent waiting for drafts."""
        self._speculator = open_speculator(config.from_environment(), gpu_id, target_worker)
        speculator.activate(self._speculator)

    # What SGLang asks of an NGRAM-like worker.

    @property
    def draft_worker(self) -> None:
        """The draft model runs in the sidecar, not here."""
        return None

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            self._target_worker.get_memory_pool()
        )

    def clear_cache_pool(self) -> None:
        """Called by /flush_cache and weight updates: drafts made before are of no use."""
        self._speculator.drop_drafts()

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """One target pass. The scheduler restores `batch`'s fields after it (forward isolation)."""
        self._speculator.poll()
        if not batch.forward_mode.is_decode():
            self._pass_ended = None
            return self._extend(batch)
        trees, width = self._propose(batch)
        if width == 1:
            trees = trees.best(1)
            result = self._decode(batch)
            accepted: list[list[int]] = [[] for _ in batch.reqs]
            bonus_ids = result.next_token_ids.tolist()
        else:
            trees = trees.best(width)
            result, accepted, bonus_ids = self._verify(batch, trees)
        self._speculator.settle([req.rid for req in batch.reqs], trees, accepted, bonus_ids)
        self._note_end(len(batch.reqs) * trees.width)
        return result

    def _note_end(self, rows: int) -> None:
        """A decode pass of so many tokens has ended."""
        now = time.monotonic()
        if self._pass_ended is not None:
            self._width.observe(rows, now - self._pass_ended - self._waited)
        self._pass_ended, self._waited = now, 0.0

    def _propose(self, batch: ScheduleBatch) -> tuple[DraftTrees, int]:
        """A tree for each request, once it is worth a pass, and the width that the pass is to have.

        Step drafts that are just being made are waited for as long as that gains more than a pass
        with what is there (`budget.Patience`).
        """
        rids = [req.rid for req in batch.reqs]
        outputs = [req.output_ids for req in batch.reqs]
        if self._needs_plain_decode(batch):
            return self._speculator.propose(rids, outputs, 1, drafts=False), 1
        if _is_penalized(batch):
            trees = self._speculator.propose(rids, outputs, self._draft_token_num, drafts=False)
            return trees, self._width.choose(trees).width
        while True:
            trees = self._speculator.propose(rids, outputs, self._draft_token_num)
            choice = self._width.choose(trees)
            gain = self._speculator.awaited(rids, trees)
            patience = self._patience.seconds(len(rids), gain, choice.rate)
            if not patience:
                return trees, choice.width
            began = time.monotonic()
            came = self._speculator.wait_for_steps(patience)
            took = time.monotonic() - began
            self._patience.observe(len(rids), took, came)
            self._waited += took
            if not came:
                return trees, choice.width

    def _needs_plain_decode(self, batch: ScheduleBatch) -> bool:
        """Whether tree verification would ignore a sampling parameter of this batch."""
        info = batch.sampling_info
        return bool(
            info.has_custom_logit_processor
            or info.has_watermark_candidates
            or (info.need_min_p_sampling and not self._on_cpu)
        )

    def _extend(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Prefill, or an idle batch: the target alone."""
        for req in batch.reqs:
            self._speculator.admit(req.rid)
        result = self._target_worker.forward_batch_generation(batch)
        return self._finish(
            batch, result, result.next_token_ids, accept_lens=None, seq_lens=batch.seq_lens.clone()
        )

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """An ordinary decode pass: one token a request, sampled as without speculation."""
        bs = len(batch.reqs)
        batch.input_ids = torch.tensor(
            [_last_id(req) for req in batch.reqs], dtype=torch.int64, device=batch.device
        )
        batch.out_cache_loc = self._slots(batch, 1)
        batch.spec_info = None
        batch.seq_lens = batch.seq_lens + 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        batch.seq_lens_sum = None
        result = self._target_worker.forward_batch_generation(batch)
        logits = result.logits_output
        if batch.return_logprob and logits.next_token_logprobs is not None:
            logits.next_token_logprobs = logits.next_token_logprobs.view(bs, 1)
        ones = torch.ones(bs, dtype=torch.int32, device=batch.device)
        return self._finish(batch, result, result.next_token_ids, ones, batch.seq_lens)

    def _verify(
        self, batch: ScheduleBatch, trees: DraftTrees
    ) -> tuple[GenerationBatchResult, list[list[int]], list[int]]:
        """A pass over all trees; for each request also the accepted nodes and the bonus token."""
        width, layout = trees.width, trees.lay_out()
        verify_input = verify_input_of(
            trees, layout, batch.seq_lens, batch.device, full_mask=not self._on_cpu
        )
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = verify_input.draft_token
        batch.out_cache_loc = self._slots(batch, width)
        batch.spec_info = verify_input
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        sample = cpu_eagle_sample if self._on_cpu else eagle_utils.eagle_sample
        predict, accept_lens, accept_index = sample(
            verify_input,
            batch,
            result.logits_output,
            self._grammar_mask(batch, trees, layout, verify_input),
        )
        if not (self._on_cpu and _is_prefix(accept_index)):
            move_accept_tokens_to_target_kvcache(
                batch, accept_index, accept_lens - 1, self.token_to_kv_pool_allocator
            )
        if batch.return_logprob:
            compute_spec_logprobs(batch, result.logits_output, predict, accept_index=accept_index)
        tokens = predict[accept_index].flatten()
        finished = self._finish(
            batch, result, tokens, accept_lens, batch.seq_lens + accept_lens, width
        )
        last = accept_index.gather(1, (accept_lens - 1).long().unsqueeze(1)).flatten()
        bonus_ids: list[int] = predict[last].tolist()
        return finished, _accepted_nodes(accept_index, accept_lens, width), bonus_ids

    def _slots(self, batch: ScheduleBatch, width: int) -> torch.Tensor:
        """KV slots [bs * width] behind each request's committed tokens; already allocated."""
        slots: torch.Tensor = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=len(batch.reqs),
            draft_token_num=width,
            device=batch.device,
        )
        return slots

    def _grammar_mask(
        self,
        batch: ScheduleBatch,
        trees: DraftTrees,
        layout: TreeLayout,
        verify_input: NgramVerifyInput,
    ) -> Any:
        if not batch.has_grammar:
            return None
        tree = GrammarTree.from_host(
            torch.from_numpy(layout.next_token),
            torch.from_numpy(layout.next_sibling),
            torch.from_numpy(trees.token_ids.astype(np.int64)),
        )
        return build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=verify_input.retrieve_next_token.device,
            barrier=None,
        )

    def _finish(
        self,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        next_token_ids: torch.Tensor,
        accept_lens: torch.Tensor | None,
        seq_lens: torch.Tensor,
        width: int = 1,
    ) -> GenerationBatchResult:
        """The result as the scheduler reads it, with rows of `width` tokens."""
        if accept_lens is None:
            accept_lens = torch.ones(len(batch.reqs), dtype=torch.int32, device=batch.device)
        # Between passes SGLang filters and merges this; without overlap nothing else is read.
        carried = NgramVerifyInput(
            draft_token_num=1,
            new_seq_lens=seq_lens,
            accept_tokens=torch.zeros(len(batch.reqs), dtype=torch.int32, device=batch.device),
            accept_lens=accept_lens,
        )
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=next_token_ids,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accept_lens,
            new_seq_lens=seq_lens,
            next_draft_input=carried,
            speculative_num_draft_tokens=width,
        )


def _is_penalized(batch: ScheduleBatch) -> bool:
    """Whether tokens are penalized by the text before them: such requests advance by one token.

    SGLang applies the penalties of the committed text to every node of a tree, which is not what
    the target alone would do behind a draft token.
    """
    info = batch.sampling_info
    return info.acc_additive_penalties is not None or info.acc_scaling_penalties is not None


def _last_id(req: Any) -> int:
    return int(req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1])


def _accepted_nodes(
    accept_index: torch.Tensor, accept_lens: torch.Tensor, width: int
) -> list[list[int]]:
    """Per request, the accepted draft nodes in order; the root, which is committed, is left out."""
    rows = accept_index.tolist()
    return [
        [index - row * width for index in indices[1:length]]
        for row, (indices, length) in enumerate(zip(rows, accept_lens.tolist(), strict=True))
    ]


def _is_prefix(accept_index: torch.Tensor) -> bool:
    """Whether every accepted path is the front of its row, so that its KV is in place already."""
    front = torch.arange(accept_index.numel(), dtype=accept_index.dtype).view_as(accept_index)
    return bool(((accept_index == front) | (accept_index < 0)).all())
