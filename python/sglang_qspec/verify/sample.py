"""Draws the target's token at every node of the draft trees.

All tensors are on one device. The host reads no value from a GPU: if the filters may need more than
a shortlist of tokens there, the whole vocabulary is ranked.

The filters are SGLang's, in its order: temperature, softmax, top-k, top-p without renormalising in
between, then min-p relative to the likeliest token. The draws have the target's distribution, so
`sglang_qspec.verify.accept` over them is lossless.

A drafter that draws from its own distribution with the same seeds and positions gets the same token
with a probability of at least (1 - d) / (1 + d), where d is the total variation distance between
the two distributions: Daliri, Musco and Suresh 2024, "Coupling without communication and
drafter-invariant speculative decoding" (arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, where

from sglang_qspec.verify import rows as picking
from sglang_qspec.verify.filters import any_filter, kept_ranks
from sglang_qspec.verify.gumbel_argmax import Ranking, gumbel_argmax, gumbel_argmax_kept
from sglang_qspec.verify.inverse import draw_columns, random_seeds
from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.rejection import Proposals, sample_near
from sglang_qspec.verify.rows import Rows, fill
from sglang_qspec.verify.seeded import gumbel, murmur_hash32

_SHORTLIST = 1024
"""Number of likeliest tokens that are ranked. The whole vocabulary is ranked only if a filter needs
more tokens."""
ALL_RANKS = 1 << 30
"""A top-k that keeps all tokens, as in SGLang."""


class Filters(Protocol):
    """The filters of one request."""

    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


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
    rank_limit: int | None = None
    """Maximum number of tokens that any filtered row keeps, by its top-k; None if unknown."""

    def of(self, rows: Rows) -> Draws:
        """The parameters of the rows with these indices."""

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return Draws(
            some(self.top_ks),
            some(self.top_ps),
            some(self.min_ps),
            some(self.seeds),
            some(self.positions),
            None if self.proposals is None else self.proposals.of(rows),
            self.rank_limit,
        )


def rank_limit_of(requests: Iterable[Filters]) -> int | None:
    """The largest top-k of the requests with a filter; None if one of them has no top-k."""
    filtered = [
        request.top_k
        for request in requests
        if request.top_k < ALL_RANKS or request.top_p < 1 or request.min_p > 0
    ]
    limit = max(filtered, default=ALL_RANKS)
    return limit if limit < ALL_RANKS else None


def sample_targets(logits: Tensor, temperatures: Tensor, draws: Draws) -> Tensor:
    """Draw one token per row of `logits` float [N, V] at `temperatures` float [N]: int64 [N]."""
    if draws.top_ks is None:
        return sample_probs(_softmax(logits, temperatures), draws)

    def draw(rows: Rows) -> Tensor:
        return sample_probs(_softmax(logits[rows], temperatures[rows]), draws.of(rows))

    return fill(likeliest(logits), draws.top_ks != 1, draw)


def sample_probs(probs: Tensor, draws: Draws) -> Tensor:
    """Draw one token per row of `probs` float32 [N, V], before any filter: int64 [N].

    Noise is hashed by token id, so that equal seeds draw alike from similar distributions. (If any
    row has a filter, SGLang hashes by rank.)
    """
    if not picking.picks(probs):
        return _sample_all(probs, draws)
    filtered = _filtered(probs, draws)
    near = None if draws.proposals is None else draws.proposals.known
    taken = [mask for mask in (filtered, near) if mask is not None]
    if not taken:
        return _draw(probs, draws)

    def draw_left(rows: Rows) -> Tensor:
        return _draw_left(*_left(probs[rows], draws.of(rows)), probs.shape[1], draws.of(rows))

    def draw_near(rows: Rows) -> Tensor:
        assert draws.proposals is not None
        return sample_near(distributions(probs[rows], draws.of(rows)), draws.proposals.of(rows))

    drawn = torch.zeros(len(probs), dtype=torch.int64, device=probs.device)
    drawn = fill(drawn, ~torch.stack(taken).any(0), lambda rows: _draw(probs[rows], draws.of(rows)))
    if filtered is not None:
        drawn = fill(drawn, filtered if near is None else filtered & ~near, draw_left)
    if near is not None:
        drawn = fill(drawn, near, draw_near)
    return drawn


def _sample_all(probs: Tensor, draws: Draws) -> Tensor:
    """`sample_probs` for devices that treat all rows alike: no value of the device is read."""
    if draws.seeds is None or draws.positions is None:
        seeds, positions = random_seeds(probs)
    else:
        seeds, positions = draws.seeds, draws.positions
    ranking = _ranking(probs, draws)
    if ranking is None:
        drawn = gumbel_argmax(probs, seeds, positions)
    else:
        drawn = gumbel_argmax_kept(probs, ranking, seeds, positions)
    if draws.proposals is None:
        return drawn
    near = sample_near(_renormalised(probs, ranking), draws.proposals)
    return where(draws.proposals.known, near, drawn)


def distributions(probs: Tensor, draws: Draws) -> Tensor:
    """`probs` [N, V] after the filters, renormalised: float [N, V]."""
    if not picking.picks(probs):
        return _renormalised(probs, _ranking(probs, draws))
    filtered = _filtered(probs, draws)
    if filtered is None:
        return probs

    def renormalised(rows: Rows) -> Tensor:
        tokens, kept = _left(probs[rows], draws.of(rows))
        kept = kept / kept.sum(1, keepdim=True)
        return torch.zeros_like(probs[rows]).scatter_(1, tokens, kept)

    return fill(probs, filtered, renormalised)


def _renormalised(probs: Tensor, ranking: Ranking | None) -> Tensor:
    """`distributions` of all rows alike, with their ranking; None if no row has a filter."""
    if ranking is None:
        return probs
    ranked, columns, *filters = ranking
    kept = where(kept_ranks(ranked, *filters), ranked, 0.0)
    kept = kept / kept.sum(1, keepdim=True)
    filtered = any_filter(probs.shape[1], *filters)
    return where(filtered.unsqueeze(1), torch.zeros_like(probs).scatter_(1, columns, kept), probs)


def _ranking(probs: Tensor, draws: Draws) -> Ranking | None:
    """The ranks that the filters may keep, without a look at the values; None without filters."""
    filters = draws.top_ks, draws.top_ps, draws.min_ps
    if all(values is None for values in filters):
        return None
    rows, vocab = probs.shape
    limit = ALL_RANKS if draws.rank_limit is None else draws.rank_limit
    if limit <= _SHORTLIST:
        ranked, columns = probs.topk(min(limit, vocab), dim=-1)
    else:
        ranked, columns = probs.sort(dim=-1, descending=True)

    def given(values: Tensor | None, without: float, dtype: torch.dtype) -> Tensor:
        if values is not None:
            return values
        return torch.full((rows,), without, dtype=dtype, device=probs.device)

    return Ranking(
        ranked,
        columns,
        given(draws.top_ks, ALL_RANKS, torch.int32),
        given(draws.top_ps, 1.0, torch.float32),
        given(draws.min_ps, 0.0, torch.float32),
    )


def likeliest_left(probs: Tensor, draws: Draws, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row of `probs` [N, V], and their filtered probabilities.

    Both are [N, count], int64 and float. Probabilities fall along a row. They are not renormalised.
    The probability of a token that the filters drop is 0.
    """
    # Each filter keeps a prefix of the ranking, and later tokens do not change this prefix.
    ranked, tokens = probs.topk(min(count, probs.shape[1]), dim=-1)
    return tokens, where(_keep(ranked, draws), ranked, 0.0)


def _softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    return torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)


def _filtered(probs: Tensor, draws: Draws) -> Tensor | None:
    """Whether any filter may drop tokens of the row: bool [N]; None if no row has a filter."""
    filters = draws.top_ks, draws.top_ps, draws.min_ps
    if all(values is None for values in filters):
        return None
    return any_filter(probs.shape[1], *filters)


def _draw_left(tokens: Tensor, kept: Tensor, vocab: int, draws: Draws) -> Tensor:
    """Draw one of the ranked `tokens` [N, R] of each row by their weights `kept` [N, R]."""
    if kept.shape[1] > _SHORTLIST:
        weights = torch.zeros(len(kept), vocab, dtype=kept.dtype, device=kept.device)
        return _draw(weights.scatter_(1, tokens, kept), draws)
    if draws.seeds is None or draws.positions is None:
        rank = _draw(kept, draws)
    else:
        noise = gumbel(murmur_hash32(draws.seeds, draws.positions, tokens))
        rank = noise.add_(kept.double().log_()).argmax(-1)
    return tokens.gather(1, rank.unsqueeze(1)).squeeze(1)


def _left(probs: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return the ranked token ids [N, R] of each row, and their weights [N, R] after the filters.

    R is at most `_SHORTLIST`, or the size of the vocabulary if the filters keep more tokens. Each
    row has a filter.
    """
    vocab = probs.shape[1]
    limit = _SHORTLIST + 1 if draws.rank_limit is None else draws.rank_limit
    ranked, tokens = probs.topk(min(limit, _SHORTLIST, vocab), dim=-1)
    kept = _keep(ranked, draws)
    if limit > _SHORTLIST and vocab > _SHORTLIST and kept[:, -1].any():
        ranked, tokens = probs.sort(dim=-1, descending=True)
        kept = _keep(ranked, draws)
    return tokens, where(kept, ranked, 0.0)


def _keep(ranked: Tensor, draws: Draws) -> Tensor:
    return kept_ranks(ranked, draws.top_ks, draws.top_ps, draws.min_ps)


def _draw(weights: Tensor, draws: Draws) -> Tensor:
    """Draw a column of each row of `weights` [N, R] >= 0 in proportion to the weights."""
    if draws.seeds is not None and draws.positions is not None:
        return gumbel_argmax(weights, draws.seeds, draws.positions)
    return draw_columns(weights)
