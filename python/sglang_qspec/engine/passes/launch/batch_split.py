"""Splits a decode batch into parts that each take a pass, and joins the results."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult

from sglang_qspec.engine.passes.launch.relay import relayed
from sglang_qspec.transfers import to_device


def can_split(batch: ScheduleBatch) -> bool:
    """Whether the batch has no state that only fits the whole batch.

    Log probabilities and hidden states have one width for all requests. Penalties, processors and
    grammars keep state by row. The worker runs a batch with any of them in one pass.
    """
    info = batch.sampling_info
    return not (
        batch.return_logprob
        or batch.return_hidden_states
        or batch.has_grammar
        or info.has_custom_logit_processor
        or info.has_watermark_candidates
        or info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or any(info.return_sampling_masks or ())
    )


def take(batch: ScheduleBatch, rows: Sequence[int]) -> ScheduleBatch:
    """A batch of the requests at the indices `rows`; it shares requests and memory with `batch`."""
    part = copy.copy(batch)
    part.sampling_info = copy.copy(batch.sampling_info)
    part.sampling_info.penalizer_orchestrator = _NoPenalties()
    part.spec_info = part.input_ids = None
    part.filter_batch(keep_indices=list(rows))
    return part


class _NoPenalties:
    """Replaces SGLang's penalty orchestrator, since `can_split` excludes batches with penalties."""

    is_required = False

    def filter(self, keep_indices: torch.Tensor) -> None:
        """Does nothing."""


def join(
    rows: Sequence[Sequence[int]], results: Sequence[GenerationBatchResult]
) -> GenerationBatchResult:
    """Join the results of parts; `rows` has the indices that `take` got for each part.

    The result has the width of the widest part; the tokens of other parts are padded.
    """
    width = max(result.speculative_num_draft_tokens for result in results)
    tokens = torch.cat(
        [
            torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
            for result in results
            for ids in [result.next_token_ids.view(-1, result.speculative_num_draft_tokens)]
        ]
    )
    (order,) = to_device(tokens.device, np.array([row for part in rows for row in part]).argsort())
    accept_lens = torch.cat([result.accept_lens for result in results])[order]
    return finished(
        LogitsProcessorOutput(next_token_logits=None),
        tokens[order].flatten(),
        accept_lens,
        torch.cat([result.new_seq_lens for result in results])[order],
        width,
        can_run_cuda_graph=all(result.can_run_cuda_graph for result in results),
    )


def finished(
    logits_output: LogitsProcessorOutput,
    next_token_ids: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    width: int,
    *,
    can_run_cuda_graph: bool,
) -> GenerationBatchResult:
    """The result of a pass in the form that the scheduler reads.

    `next_token_ids` are [bs * width], `accept_lens` and the new `seq_lens` [bs].
    """
    return GenerationBatchResult(
        logits_output=logits_output,
        next_token_ids=next_token_ids,
        can_run_cuda_graph=can_run_cuda_graph,
        accept_lens=accept_lens,
        new_seq_lens=seq_lens,
        next_draft_input=relayed(next_token_ids, accept_lens, seq_lens),
        speculative_num_draft_tokens=width,
    )
