"""Penalties on repeated output tokens, at every node of a draft tree.

A token's penalty depends on how often the output contains it. At a node, the output is the
committed tokens and the path from the root to the node. So each node gets the distribution that
plain decoding would have after the same tokens, and draws there are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, where


class Penalty(NamedTuple):
    """Penalties of one request, with the names and the order of SGLang's sampling parameters.

    For a token that occurs n > 0 times in the output, `frequency` * n + `presence` is subtracted
    from the logit. Then a positive logit is divided by `repetition` and a negative one multiplied.
    Tokens of `stop_ids` are excluded while the output is shorter than `min_new_tokens`.
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


def penalize(
    logits: Tensor, penalty: Penalty, output_ids: Tensor, draft_ids: Tensor, mask: Tensor
) -> None:
    """Apply the penalties to `logits` float [D, V] of one request's tree, in place.

    `output_ids` int64 [n] are the committed output tokens, the root's token included. `draft_ids`
    int64 [D - 1] are the tokens of the other nodes. `mask` bool [D, D] is true at [i, j] if node j
    is node i or an ancestor of it.
    """
    behind = mask[:, 1:].float()
    lengths = len(output_ids) + behind.sum(1)
    if len(output_ids) + len(draft_ids):
        ids, places = torch.cat((output_ids, draft_ids)).unique(return_inverse=True)
        committed = places[: len(output_ids)].bincount(minlength=len(ids))
        counts = committed.float().repeat(len(logits), 1)
        counts.scatter_add_(1, places[len(output_ids) :].expand_as(behind), behind)
        said = counts > 0
        part = logits[:, ids].float()
        part = part - (counts * penalty.frequency + said * penalty.presence)
        scaled = where(part < 0, part * penalty.repetition, part / penalty.repetition)
        logits[:, ids] = where(said, scaled, part).to(logits.dtype)
    early = (lengths < penalty.min_new_tokens).nonzero()
    if len(early) and penalty.stop_ids:
        logits[early, torch.tensor(penalty.stop_ids)] = float("-inf")
