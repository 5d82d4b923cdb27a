"""Draw the target's tokens so that they are the drafted ones as often as can be.

Rejection sampling, for a drafter that draws a token x from a distribution q and tells both: keep x
with the chance min(1, p(x) / q(x)), and otherwise draw from what p has over q. The result has the
target's distribution p and is x with a probability of 1 - d, where d is the total variation
distance of the two: no rule that sees p, q and x does better. Leviathan et al. 2023
(arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318).

This is a way to draw at one node, so that `sglang_qspec.verify.accept` over such draws is lossless
on trees as well: where x is left, the draw may still meet another child (SpecInfer's multi-branch
verification, arXiv:2305.09781, with one sampled child and others that are fixed). It is exact on
one condition: at every node that has an x, x counts, in the tree or not. Were a drafted token
tested only where the tree has it, and had the tree been chosen by what was drafted, then x would
not be distributed as q among the tokens tested.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, where

from sglang_qspec.verify.inverse import draw_columns


class Proposals(NamedTuple):
    """What a drafter drew at each of N nodes, and from which distribution."""

    known: Tensor
    """bool [N]: whether it drew anything there; the rest of a row says nothing if not."""
    token_ids: Tensor
    """int64 [N]"""
    candidate_ids: Tensor
    """int64 [N, M]: all tokens that it might have drawn."""
    candidate_probs: Tensor
    """float [N, M]: their probabilities, which sum to 1; 0 for padding."""

    def of(self, rows: Tensor) -> Proposals:
        """Those of some nodes."""
        return Proposals(*(values[rows] for values in self))


def sample_near(probs: Tensor, proposals: Proposals) -> Tensor:
    """Draw one token per row of the target's `probs` float [N, V], which sum to 1: int64 [N].

    Rows without a proposal are drawn from `probs` alone. Numbers come from torch's global
    generator; nothing that the drafter drew may depend on them.
    """
    known, token_ids, ids, candidate_probs = proposals
    wanted = probs.gather(1, where(known, token_ids, 0).unsqueeze(1)).squeeze(1)
    offered = (candidate_probs * (ids == token_ids.unsqueeze(1))).sum(1)
    kept = known & (torch.rand(len(probs), device=probs.device) * offered < wanted)
    drawn = where(kept, token_ids, 0)
    rest = (~kept).nonzero()[:, 0]
    if len(rest):
        offers = candidate_probs[rest] * known[rest].unsqueeze(1)
        drawn[rest] = draw_columns(_left_over(probs[rest], ids[rest], offers))
    return drawn


def _left_over(probs: Tensor, ids: Tensor, offers: Tensor) -> Tensor:
    """What each row of `probs` [n, V] has over the `offers` [n, M] for tokens `ids`."""
    left = probs.scatter_add(1, ids, offers.to(probs.dtype).neg()).clamp_(min=0)
    # Where rounding leaves nothing, the distributions are equal but for rounding.
    return where(left.sum(1, keepdim=True) > 0, left, probs)
