"""SGLang's filters over the probabilities of tokens in falling order.

Each filter keeps a beginning of the ranks. So a rank that is dropped is followed by dropped ranks
only.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import torch
from torch import Tensor


def kept_ranks(
    ranked: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None
) -> Tensor:
    """Whether the filters keep each rank of `ranked` float [N, R]: bool [N, R].

    The filters are [N], or None: top-k, then top-p without renormalising, then min-p relative to
    the likeliest token. Rows are in falling order.
    """
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if top_ks is not None:
        kept &= torch.arange(ranked.shape[1], device=ranked.device) < top_ks.view(-1, 1)
    if top_ps is not None:
        kept &= ranked.cumsum(-1) - ranked <= top_ps.view(-1, 1)
    if min_ps is not None:
        kept &= ranked >= ranked[:, :1] * min_ps.view(-1, 1)
    return kept


def any_filter(
    vocab: int, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None
) -> Tensor:
    """Whether a filter may drop tokens of a row over `vocab` tokens: bool [N]; not all are None."""
    masks = [
        None if top_ks is None else top_ks < vocab,
        None if top_ps is None else top_ps < 1,
        None if min_ps is None else min_ps > 0,
    ]
    return reduce(or_, (mask for mask in masks if mask is not None))
