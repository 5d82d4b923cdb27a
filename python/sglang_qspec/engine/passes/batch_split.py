"""A decoding batch in parts, each verified in a pass of its own, and their results as one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.speculative.ngram_info import NgramVerifyInput


def can_split(batch: ScheduleBatch) -> bool:
    """Whether nothing in this batch is kept for the batch as a whole.

    Log probabilities and hidden states come in rows of a common width, and penalties, processors
    and grammars keep their state by row: such batches are rare, and are verified in one pass.
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
    """Some rows of a batch as a batch; the requests and their memory are the same ones."""
    part = copy.copy(batch)
    part.sampling_info = copy.copy(batch.sampling_info)
    part.sampling_info.penalizer_orchestrator = _NoPenalties()
    part.spec_info = part.input_ids = None
    part.filter_batch(keep_indices=list(rows))
    return part


class _NoPenalties:
    """Filtered along with a batch's sampling; a forward pass has no orchestrator of penalties."""

    is_required = False

    def filter(self, keep_indices: torch.Tensor) -> None:
        """There is nothing to filter."""


def join(
    rows: Sequence[Sequence[int]], results: Sequence[GenerationBatchResult]
) -> GenerationBatchResult:
    """The results of all parts as that of the batch whose `rows` they had.

    The scheduler reads tokens in rows of one width, the largest that a part had.
    """
    order = torch.tensor([row for part in rows for row in part]).argsort()
    width = max(result.speculative_num_draft_tokens for result in results)
    tokens = torch.cat(
        [
            torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
            for result in results
            for ids in [result.next_token_ids.view(-1, result.speculative_num_draft_tokens)]
        ]
    )
    order = order.to(tokens.device)
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
    """A pass as the scheduler reads it, with `next_token_ids` [bs * width].

    `accept_lens` and the new `seq_lens` are [bs].
    """
    # Between passes SGLang filters and merges this; without overlap nothing else is read.
    carried = NgramVerifyInput(
        draft_token_num=1,
        new_seq_lens=seq_lens,
        accept_tokens=torch.zeros_like(accept_lens, dtype=torch.int32),
        accept_lens=accept_lens,
    )
    return GenerationBatchResult(
        logits_output=logits_output,
        next_token_ids=next_token_ids,
        can_run_cuda_graph=can_run_cuda_graph,
        accept_lens=accept_lens,
        new_seq_lens=seq_lens,
        next_draft_input=carried,
        speculative_num_draft_tokens=width,
    )
