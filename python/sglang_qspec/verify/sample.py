"""Draws the target's token at every node of the draft trees.

All tensors are on one device. On a GPU the host waits for the device at most once, to learn whether
the filters need more than a shortlist of tokens. With `Draws.rank_limit` it does not wait.

The filters are SGLang's, in its order: temperature, softmax, top-k, top-p without renormalising in
between, then min-p relative to the likeliest token. The draws have the target's distribution, so
`sglang_qspec.verify.accept` over them is lossless.

A drafter that draws from its own distribution with the same seeds and positions gets the same token
with a probability of at least (1 - d) / (1 + d), where d is the total variation distance between
the two distributions: Daliri, Musco and Suresh 2024, "Coupling without communication and
drafter-invariant speculative decoding" (arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from sglang_qspec.verify.inverse import draw_columns
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
    filtered = _filtered(probs, draws)
    near = None if draws.proposals is None else draws.proposals.known
    taken = [mask for mask in (filtered, near) if mask is not None]
    if not taken:
        return _draw(probs, draws)

    shared: list[tuple[Tensor, Tensor]] = []

    def left(rows: Rows) -> tuple[Tensor, Tensor]:
        if not isinstance(rows, slice):
            return _left(probs[rows], draws.of(rows))
        if not shared:  # both ways of drawing may need the ranks of all rows
            shared.append(_left(probs, draws))
        return shared[0]

    def draw_near(rows: Rows) -> Tensor:
        if isinstance(rows, slice):
            distribution = _distributions(probs, draws, left)
        else:
            distribution = distributions(probs[rows], draws.of(rows))
        assert draws.proposals is not None
        return sample_near(distribution, draws.proposals.of(rows))

    drawn = torch.zeros(len(probs), dtype=torch.int64, device=probs.device)
    drawn = fill(drawn, ~torch.stack(taken).any(0), lambda rows: _draw(probs[rows], draws.of(rows)))
    if filtered is not None:
        drawn = fill(
            drawn,
            filtered if near is None else filtered & ~near,
            lambda rows: _draw_left(*left(rows), probs.shape[1], draws.of(rows)),
        )
    if near is not None:
        drawn = fill(drawn, near, draw_near)
    return drawn


def distributions(probs: Tensor, draws: Draws) -> Tensor:
    """`probs` [N, V] after the filters, renormalised: float [N, V]."""
    return _distributions(probs, draws, lambda rows: _left(probs[rows], draws.of(rows)))


def _distributions(
    probs: Tensor, draws: Draws, left: Callable[[Rows], tuple[Tensor, Tensor]]
) -> Tensor:
    filtered = _filtered(probs, draws)
    if filtered is None:
        return probs

    def renormalised(rows: Rows) -> Tensor:
        tokens, kept = left(rows)
        kept = kept / kept.sum(1, keepdim=True)
        return torch.zeros_like(probs[rows]).scatter_(1, tokens, kept)

    return fill(probs, filtered, renormalised)


def likeliest_left(probs: Tensor, draws: Draws, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row of `probs` [N, V], and their filtered probabilities.

    Both are [N, count], int64 and float. Probabilities fall along a row. They are not renormalised.
    The probability of a token that the filters drop is 0.
    """
    # Each filter keeps a prefix of the ranking, and later tokens do not change this prefix.
    ranked, tokens = probs.topk(min(count, probs.shape[1]), dim=-1)
    return tokens, _filter(ranked, draws)[0]


def _softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    return torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)


def _filtered(probs: Tensor, draws: Draws) -> Tensor | None:
    """Whether any filter may drop tokens of the row: bool [N]; None if no row has a filter."""
    filters = [
        None if draws.top_ks is None else draws.top_ks < probs.shape[1],
        None if draws.top_ps is None else draws.top_ps < 1,
        None if draws.min_ps is None else draws.min_ps > 0,
    ]
    given = [rows for rows in filters if rows is not None]
    return torch.stack(given).any(0) if given else None


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

    R is at most `_SHORTLIST`, or the size of the vocabulary if the filters keep more tokens. Rows
    without a filter may lose tokens.
    """
    vocab = probs.shape[1]
    limit = _SHORTLIST + 1 if draws.rank_limit is None else draws.rank_limit
    limited = limit <= _SHORTLIST
    ranked, tokens = probs.topk(min(limit, _SHORTLIST, vocab), dim=-1)
    kept, beyond = _filter(ranked, draws)
    if limited or ranked.shape[1] == vocab:
        return tokens, kept
    filtered = _filtered(probs, draws)
    complete = beyond if filtered is None else beyond | ~filtered
    if not complete.all():
        ranked, tokens = probs.sort(dim=-1, descending=True)
        kept, _ = _filter(ranked, draws)
    return tokens, kept


def _filter(ranked: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Set dropped tokens of `ranked` [N, R] to 0; each row is in falling order.

    Also returns whether the filters of a row drop all tokens beyond the R ranks: bool [N].
    """
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    dropped = torch.zeros_like(ranked, dtype=torch.bool)
    beyond = torch.zeros(len(ranked), dtype=torch.bool, device=ranked.device)
    if draws.top_ks is not None:
        dropped |= ranks >= draws.top_ks.view(-1, 1)
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
    return kept, beyond


def _draw(weights: Tensor, draws: Draws) -> Tensor:
    """Draw a column of each row of `weights` [N, R] >= 0 in proportion to the weights."""
    if draws.seeds is not None and draws.positions is not None:
        return gumbel_argmax(weights, draws.seeds, draws.positions)
    return draw_columns(weights)
