"""Rejection sampling: draws the target's tokens so that they equal drafted tokens most often.

The drafter draws a token x from a distribution q and sends both. The target keeps x with the
probability min(1, p(x) / q(x)), and otherwise draws from max(p - q, 0), normalised. The result has
the target's distribution p. It is x with the probability 1 - d, where d is the total variation
distance of p and q; no rule that sees p, q and x does better. Leviathan et al. 2023
(arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318).

The rule draws at one node, so `sglang_qspec.verify.accept` over these draws is lossless on trees
too. If x is rejected, the draw may still equal another child's token (SpecInfer's multi-branch
verification, arXiv:2305.09781, with one sampled child and fixed others).

It is exact on one condition: the rule must be applied at every node with a drafted token x, even if
the tree does not contain x. The choice of the tree depends on the drafted tokens. So among the
tokens in the tree alone, x would not have the distribution q.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, where

from sglang_qspec.verify.inverse import draw_columns
from sglang_qspec.verify.rows import Rows, fill


class Proposals(NamedTuple):
    """The token that a drafter drew at each of N nodes, and the distribution of the draw."""

    known: Tensor
    """bool [N]: whether the node has a drafted token; if not, the other fields have no meaning."""
    token_ids: Tensor
    """int64 [N]: the drafted tokens."""
    candidate_ids: Tensor
    """int64 [N, M]: all tokens that the drafter could have drawn."""
    candidate_probs: Tensor
    """float [N, M]: their probabilities, which sum to 1; 0 for padding."""

    def of(self, rows: Rows) -> Proposals:
        """The proposals of the nodes with these indices."""
        return Proposals(*(values[rows] for values in self))


def sample_near(probs: Tensor, proposals: Proposals) -> Tensor:
    """Draw one token per row of the target's `probs` float [N, V], which sum to 1: int64 [N].

    For rows without a proposal it draws from `probs` alone. The random numbers come from torch's
    global generator, and the drafter's tokens must not depend on them.
    """
    known, token_ids, ids, candidate_probs = proposals
    wanted = probs.gather(1, where(known, token_ids, 0).unsqueeze(1)).squeeze(1)
    offered = (candidate_probs * (ids == token_ids.unsqueeze(1))).sum(1)
    kept = known & (torch.rand(len(probs), device=probs.device) * offered < wanted)

    def draw_anew(rows: Rows) -> Tensor:
        offers = candidate_probs[rows] * known[rows].unsqueeze(1)
        return draw_columns(_left_over(probs[rows], ids[rows], offers))

    return fill(token_ids, ~kept, draw_anew)


def _left_over(probs: Tensor, ids: Tensor, offers: Tensor) -> Tensor:
    """Return max(p - q, 0) for p in `probs` [n, V] and q in `offers` [n, M] of the tokens `ids`."""
    left = probs.scatter_add(1, ids, offers.to(probs.dtype).neg()).clamp_(min=0)
    # If nothing is left, the two distributions are equal except for rounding.
    return where(left.sum(1, keepdim=True) > 0, left, probs)
