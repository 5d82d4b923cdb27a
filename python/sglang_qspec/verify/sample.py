"""Draw the target's token at every node of the draft trees.

The filters are SGLang's, in its order: temperature, softmax, top-k, top-p over what is left
without renormalising in between, then min-p against the likeliest token. A draw from what remains
is one from the target's distribution, so `sglang_qspec.verify.accept` over these draws is
lossless.
"""

import math

import torch
from torch import Tensor

from sglang_qspec.verify.seeded import murmur_hash32

_SHORTLIST = 1024
"""Tokens that are ranked at first; the whole vocabulary only if the filters reach beyond."""


def sample_targets(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Draw one token per row of `logits` float [N, V]; returns int64 [N].

    `temperatures`, `top_ps`, `min_ps` are float [N] and `top_ks` int [N]; None leaves a filter
    out, and a `top_ks` of at least V keeps all tokens, one of 1 gives the argmax. Rows with
    `seeds` int [N] draw the number that SGLang's own sampler would use at `positions` int [N],
    all others from torch's global generator.
    """
    probs = torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)
    if top_ks is None and top_ps is None and min_ps is None:
        return _draw(probs, seeds, positions)
    vocab = probs.shape[1]
    size = min(_SHORTLIST, vocab)
    while True:
        ranked, tokens = probs.topk(size, dim=-1)
        kept, complete = _filter(ranked, top_ks, top_ps, min_ps)
        if complete or size == vocab:
            break
        size = vocab
    rank = _draw(kept, seeds, positions)
    drawn = tokens.gather(1, rank.unsqueeze(1)).squeeze(1)
    return drawn if top_ks is None else torch.where(top_ks == 1, logits.argmax(-1), drawn)


def _filter(
    ranked: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None
) -> tuple[Tensor, bool]:
    """Zero what the filters drop of `ranked` [N, R], which falls along each row.

    Also says whether everything beyond the R ranks would be dropped too.
    """
    dropped = torch.zeros_like(ranked, dtype=torch.bool)
    beyond = torch.zeros(ranked.shape[0], dtype=torch.bool)
    if top_ks is not None:
        dropped |= torch.arange(ranked.shape[1]) >= top_ks.view(-1, 1)
        beyond |= top_ks <= ranked.shape[1]
    kept = ranked.masked_fill(dropped, 0.0)
    if top_ps is not None:
        mass = kept.cumsum(-1)
        dropped |= mass - kept > top_ps.view(-1, 1)
        beyond |= mass[:, -1] > top_ps
        kept = ranked.masked_fill(dropped, 0.0)
    if min_ps is not None:
        floor = kept[:, :1] * min_ps.view(-1, 1)
        dropped |= kept < floor
        beyond |= ranked[:, -1] < floor.squeeze(1)
        kept = ranked.masked_fill(dropped, 0.0)
    return kept, bool(beyond.all())


def _draw(weights: Tensor, seeds: Tensor | None, positions: Tensor | None) -> Tensor:
    """Draw a column of each row of `weights` [N, R] >= 0 in proportion to its weight."""
    if seeds is not None and positions is not None:
        return _seeded_draw(weights, seeds, positions)
    # Inverse of the distribution function, in float64 so that 2**-24 steps do not show.
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    point = torch.rand(total.shape, dtype=torch.float64) * total
    # The last step below keeps a point that was rounded up to the total on a possible column.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, point, right=True).squeeze(1)


def _seeded_draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """SGLang's `multinomial_with_seed`: the Gumbel maximum over hashed uniform numbers."""
    columns = torch.arange(weights.shape[1])
    uniform = murmur_hash32(seeds, positions, columns).double() / (2**32 - 1)
    logs = uniform.log_().clamp_(min=torch.finfo(torch.float64).min, max=-math.ldexp(1, -32))
    noise = logs.neg_().log_().neg_()
    return (noise + weights.double().log()).argmax(-1)
