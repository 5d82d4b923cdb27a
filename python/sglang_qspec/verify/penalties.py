"""Penalties on what an answer has said, at every node of a draft tree.

A token's penalties go by how often the output has it. Behind a draft token the output is what is
committed and the path from the root to there: with that counted, a node's distribution is the one
that plain decoding would have after the same tokens, and so what is drawn there is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, where


class Penalty(NamedTuple):
    """Those of one request, by the names and in the order of SGLang's sampling parameters.

    A token that the output has n times loses `frequency` * n + `presence` (if n > 0) of its logit;
    then, if n > 0, a positive logit is divided and a negative one multiplied by `repetition`. No
    token of `stop_ids` is possible in an output of fewer than `min_new_tokens`.
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


def penalize(
    logits: Tensor, penalty: Penalty, output_ids: Tensor, draft_ids: Tensor, mask: Tensor
) -> None:
    """Change `logits` float [D, V] at the nodes of one request's tree, in place.

    `output_ids` int64 [n] are committed, the root's token among them. `draft_ids` int64 [D - 1] are
    the tokens of the other nodes, and `mask` bool [D, D] has, in row i, node i and its ancestors.
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
