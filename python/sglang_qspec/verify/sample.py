"""Draws the target's token at every node of the draft trees.

The filters are SGLang's, in its order: temperature, softmax, top-k, top-p without renormalising in
between, then min-p relative to the likeliest token. The draws have the target's distribution, so
`sglang_qspec.verify.accept` over them is lossless.

A drafter that draws from its own distribution with the same seeds and positions gets the same token
with a probability of at least (1 - d) / (1 + d), where d is the total variation distance between
the two distributions: Daliri, Musco and Suresh 2024, "Coupling without communication and
drafter-invariant speculative decoding" (arXiv:2408.07978).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from sglang_qspec.verify.inverse import draw_columns
from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.rejection import Proposals, sample_near
from sglang_qspec.verify.seeded import gumbel, murmur_hash32

_SHORTLIST = 1024
"""Number of tokens that are ranked first; the whole vocabulary only if the filters need more."""


class Draws(NamedTuple):
    """Sampling parameters of N rows of logits (one per tree node); None leaves a filter out."""

    top_ks: Tensor | None = None
    """int [N]: V or more keeps all tokens, 1 gives the argmax."""
    top_ps: Tensor | None = None
    """float [N]"""
    min_ps: Tensor | None = None
    """float [N]"""
    seeds: Tensor | None = None
    """int [N]: a row's draw depends only on its seed, position and distribution. Without `seeds`
    and `positions`, numbers come from torch's global generator."""
    positions: Tensor | None = None
    """int [N]: position of the drawn token in the text."""
    proposals: Proposals | None = None
    """Drafted tokens: rows with a known one are drawn by `sglang_qspec.verify.rejection`."""

    def of(self, rows: Tensor) -> Draws:
        """The parameters of the rows with these indices, or where a mask is true."""

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return Draws(
            some(self.top_ks),
            some(self.top_ps),
            some(self.min_ps),
            some(self.seeds),
            some(self.positions),
            None if self.proposals is None else self.proposals.of(rows),
        )


def sample_targets(logits: Tensor, temperatures: Tensor, draws: Draws) -> Tensor:
    """Draw one token per row of `logits` float [N, V] at `temperatures` float [N]: int64 [N]."""
    if draws.top_ks is None:
        return sample_probs(_softmax(logits, temperatures), draws)
    drawn = likeliest(logits)
    rows = (draws.top_ks != 1).nonzero()[:, 0]
    if len(rows):
        drawn[rows] = sample_probs(_softmax(logits[rows], temperatures[rows]), draws.of(rows))
    return drawn


def sample_probs(probs: Tensor, draws: Draws) -> Tensor:
    """Draw one token per row of `probs` float32 [N, V], before any filter: int64 [N].

    Noise is hashed by token id, so that equal seeds draw alike from similar distributions. (If any
    row has a filter, SGLang hashes by rank.)
    """
    filtered = _filtered(probs, draws)
    near = torch.zeros_like(filtered) if draws.proposals is None else draws.proposals.known
    alone = ~(filtered | near)
    if alone.all():
        return _draw(probs, draws)
    drawn = torch.empty(len(probs), dtype=torch.int64)
    ways = ((near, _draw_near), (filtered & ~near, _draw_filtered), (alone, _draw))
    for rows, draw in ways:
        index = rows.nonzero()[:, 0]
        if len(index):
            drawn[index] = draw(probs[index], draws.of(index))
    return drawn


def distributions(probs: Tensor, draws: Draws) -> Tensor:
    """`probs` [N, V] after the filters, renormalised: float [N, V]."""
    rows = _filtered(probs, draws).nonzero()[:, 0]
    if not len(rows):
        return probs
    tokens, kept = _left(probs[rows], draws.of(rows))
    kept /= kept.sum(1, keepdim=True)
    left = probs.clone()
    left[rows] = probs.new_zeros(len(rows), probs.shape[1]).scatter_(1, tokens, kept)
    return left


def likeliest_left(probs: Tensor, draws: Draws, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row of `probs` [N, V], and their filtered probabilities.

    Both are [N, count], int64 and float. Probabilities fall along a row; they are not renormalised,
    and 0 for tokens that the filters drop.
    """
    # Each filter keeps a prefix of the ranking, which does not depend on the tokens behind it.
    ranked, tokens = probs.topk(min(count, probs.shape[1]), dim=-1)
    return tokens, _filter(ranked, draws)[0]


def _softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    return torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)


def _filtered(probs: Tensor, draws: Draws) -> Tensor:
    """Whether any filter may drop tokens of the row: bool [N]."""
    filtered = torch.zeros(len(probs), dtype=torch.bool)
    if draws.top_ks is not None:
        filtered |= draws.top_ks < probs.shape[1]
    if draws.top_ps is not None:
        filtered |= draws.top_ps < 1
    if draws.min_ps is not None:
        filtered |= draws.min_ps > 0
    return filtered


def _draw_near(probs: Tensor, draws: Draws) -> Tensor:
    assert draws.proposals is not None
    return sample_near(distributions(probs, draws), draws.proposals)


def _draw_filtered(probs: Tensor, draws: Draws) -> Tensor:
    tokens, kept = _left(probs, draws)
    if kept.shape[1] > _SHORTLIST:
        return _draw(torch.zeros_like(probs).scatter_(1, tokens, kept), draws)
    if draws.seeds is None or draws.positions is None:
        rank = _draw(kept, draws)
    else:
        noise = gumbel(murmur_hash32(draws.seeds, draws.positions, tokens))
        rank = noise.add_(kept.double().log_()).argmax(-1)
    return tokens.gather(1, rank.unsqueeze(1)).squeeze(1)


def _left(probs: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return the ranked token ids [N, R] of each row, and their weights [N, R] after the filters.

    R is `_SHORTLIST`, or the size of the vocabulary if the filters keep more tokens.
    """
    vocab = probs.shape[1]
    ranked, tokens = probs.topk(min(_SHORTLIST, vocab), dim=-1)
    kept, complete = _filter(ranked, draws)
    if not complete and ranked.shape[1] < vocab:
        ranked, tokens = probs.sort(dim=-1, descending=True)
        kept, _ = _filter(ranked, draws)
    return tokens, kept


def _filter(ranked: Tensor, draws: Draws) -> tuple[Tensor, bool]:
    """Set dropped tokens of `ranked` [N, R] to 0; each row is in falling order.

    Also returns whether the filters drop all tokens beyond the R ranks.
    """
    dropped = torch.zeros_like(ranked, dtype=torch.bool)
    beyond = torch.zeros(ranked.shape[0], dtype=torch.bool)
    if draws.top_ks is not None:
        dropped |= torch.arange(ranked.shape[1]) >= draws.top_ks.view(-1, 1)
        beyond |= draws.top_ks <= ranked.shape[1]
    kept = ranked.masked_fill(dropped, 0.0)
    if draws.top_ps is not None:
        mass = kept.cumsum(-1)
        dropped |= mass - kept > draws.top_ps.view(-1, 1)
        beyond |= mass[:, -1] > draws.top_ps
        kept = ranked.masked_fill(dropped, 0.0)
    if draws.min_ps is not None:
        floor = kept[:, :1] * draws.min_ps.view(-1, 1)
        dropped |= kept < floor
        beyond |= ranked[:, -1] < floor.squeeze(1)
        kept = ranked.masked_fill(dropped, 0.0)
    return kept, bool(beyond.all())


def _draw(weights: Tensor, draws: Draws) -> Tensor:
    """Draw a column of each row of `weights` [N, R] >= 0 in proportion to the weights."""
    if draws.seeds is not None and draws.positions is not None:
        return gumbel_argmax(weights, draws.seeds, draws.positions)
    return draw_columns(weights)
