"""Applies the penalties for a request's whole output, in verify passes and plain passes.

SGLang adds only the last token of each pass to the state of a penalty, and loses the state when it
retracts the request. So this module counts the outputs of the requests (`output_counts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sglang_qspec.engine.passes.outputs import output_of
from sglang_qspec.engine.passes.sample.output_counts import OutputCounts
from sglang_qspec.transfers import to_device
from sglang_qspec.verify.penalties import BatchPenalties, Penalty, penalize

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def penalize_trees(
    logits: Tensor, reqs: Sequence[Any], token_ids: Tensor, mask: Tensor, rows: Tensor
) -> None:
    """Apply penalties to `logits` float [R, V] at all nodes of the requests' trees, in place.

    The other arguments are as in `verify.penalties.penalize`.
    """
    penalties = batch_penalties(reqs, logits.device, logits.shape[1])
    if penalties is not None:
        penalize(logits, penalties, token_ids, mask, rows)


def batch_penalties(
    reqs: Sequence[Any], device: torch.device, vocab_size: int
) -> BatchPenalties | None:
    """The penalties of all requests with penalties; None if no request has any."""
    found = [(row, req, penalty_of(req, vocab_size)) for row, req in enumerate(reqs)]
    penalized = [(row, req, penalty) for row, req, penalty in found if penalty is not None]
    if not penalized:
        return None
    rows, owners, penalties = zip(*penalized, strict=True)
    counts = _counts_on(device)
    changes = counts.read(owners)
    lists = [penalty.stop_ids for penalty in penalties]
    longest = max(map(len, lists))
    stop_ids = [list(ids) + (list(ids[:1]) or [0]) * (longest - len(ids)) for ids in lists]
    numbers, factors, stops, entries = to_device(
        device,
        np.array(
            [
                rows,
                [penalty.min_new_tokens if penalty.stop_ids else 0 for penalty in penalties],
                [len(output_of(req)) for req in owners],
                changes.slots,
                changes.used,
            ],
            np.int64,
        ),
        np.array([penalty[:3] for penalty in penalties], np.float32).T,
        np.array(stop_ids, np.int64).reshape(len(lists), longest),
        changes.entries,
    )
    at, min_new_tokens, output_lens, slots, used = numbers
    output_ids, output_counts = counts.write(slots, entries, used, int(changes.used.max()))
    frequency, presence, repetition = factors
    return BatchPenalties(
        at,
        frequency,
        presence,
        repetition,
        min_new_tokens,
        stops,
        output_lens,
        output_ids,
        output_counts,
    )


@cache
def _counts_on(device: torch.device) -> OutputCounts:
    """The counts of all requests of this process."""
    return OutputCounts(device)


def read_outputs(batch: ScheduleBatch) -> None:
    """Make the plain pass over `batch` apply the penalties for the whole outputs.

    `batch.sampling_info` is a copy for this pass, so nothing has to be restored.
    """
    info = batch.sampling_info
    if info.acc_additive_penalties is None and info.acc_scaling_penalties is None:
        return
    info.acc_additive_penalties = info.acc_scaling_penalties = None
    info.penalizer_orchestrator = _OutputPenalties(batch.reqs)


class _OutputPenalties:
    """The part of `BatchedPenalizerOrchestrator` that SGLang's sampler calls, for one pass."""

    is_required = True

    def __init__(self, reqs: Sequence[Any]) -> None:
        self._reqs = reqs

    def apply(self, logits: Tensor) -> None:
        """Apply the penalties to `logits` float [bs, V], in place."""
        rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
        alone = torch.ones_like(rows, dtype=torch.bool).unsqueeze(2)
        penalize_trees(logits, self._reqs, torch.zeros_like(rows), alone, rows)


def penalty_of(req: Any, vocab_size: int) -> Penalty | None:
    """Return the penalties of a request; None if it has none."""
    params = req.sampling_params
    penalty = Penalty(params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    if params.min_new_tokens > len(output_of(req)):
        stop_ids = _stop_ids(req, vocab_size)
        penalty = penalty._replace(min_new_tokens=params.min_new_tokens, stop_ids=stop_ids)
    return None if penalty == Penalty() else penalty


def _stop_ids(req: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the stop tokens that SGLang's `BatchedMinNewTokensPenalizer` would exclude.

    A client, a checkpoint or a tokenizer may name tokens that the model does not have.
    """
    tokenizer = req.tokenizer
    ids = {
        *(req.sampling_params.stop_token_ids or ()),
        *(req.eos_token_ids or ()),
        *(tokenizer.additional_stop_token_ids or ()),
        tokenizer.eos_token_id,
    }
    return tuple(sorted(token_id for token_id in ids - {None} if 0 <= token_id < vocab_size))
