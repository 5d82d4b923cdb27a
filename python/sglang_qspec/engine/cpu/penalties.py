"""Applies penalties by a request's whole output, in verify passes and in plain ones.

SGLang adds only the last token of each pass to a penalty's state, and loses the state in a
retraction. So this module keeps no state, and reads the output from the request in each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_qspec.verify.penalties import Penalty, penalize

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def penalize_trees(logits: Tensor, reqs: Sequence[Any], token_ids: Tensor, mask: Tensor) -> None:
    """Apply penalties to `logits` float [bs * D, V] at all nodes of the requests' trees, in place.

    `token_ids` is int64 [bs, D]; `mask` is bool [bs, D, D], as in `trie.TreeLayout`.
    """
    nodes = logits.view(*token_ids.shape, logits.shape[-1])
    for row, req in enumerate(reqs):
        penalty = penalty_of(req)
        if penalty is not None:
            output_ids = torch.tensor(req.output_ids, dtype=torch.int64)
            penalize(nodes[row], penalty, output_ids, token_ids[row, 1:], mask[row])


def read_outputs(batch: ScheduleBatch) -> None:
    """Make the plain pass over `batch` apply the penalties of the whole outputs.

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
        roots = torch.zeros(len(logits), 1, dtype=torch.int64)
        penalize_trees(logits, self._reqs, roots, torch.ones(len(logits), 1, 1, dtype=torch.bool))


def penalty_of(req: Any) -> Penalty | None:
    """Return the penalties of a request; None if it has none."""
    params = req.sampling_params
    penalty = Penalty(params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    if params.min_new_tokens > len(req.output_ids):
        penalty = penalty._replace(min_new_tokens=params.min_new_tokens, stop_ids=_stop_ids(req))
    return None if penalty == Penalty() else penalty


def _stop_ids(req: Any) -> tuple[int, ...]:
    """Return the stop tokens that `BatchedMinNewTokensPenalizer` would exclude."""
    tokenizer = req.tokenizer
    ids = {
        *(req.sampling_params.stop_token_ids or ()),
        *(req.eos_token_ids or ()),
        *(tokenizer.additional_stop_token_ids or ()),
        tokenizer.eos_token_id,
    }
    return tuple(sorted(ids - {None}))
