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


class BatchPenalties(NamedTuple):
    """The penalties of n requests with their committed output, on the device of the logits."""

    rows: Tensor
    """int64 [n]: places of the requests in the batch."""
    frequency: Tensor
    """float32 [n]"""
    presence: Tensor
    """float32 [n]"""
    repetition: Tensor
    """float32 [n]"""
    min_new_tokens: Tensor
    """int64 [n]"""
    stop_ids: Tensor
    """int64 [n, S]: stop tokens. A shorter list is padded with its own ids. A request without ids
    has any id, and its `min_new_tokens` is 0."""
    output_lens: Tensor
    """int64 [n]: number of committed output tokens, the root's token included."""
    output_ids: Tensor
    """int64 [n, K > 0]: the distinct output tokens. A shorter list is padded with an id of its own,
    or with any id if the output is empty."""
    output_counts: Tensor
    """float32 [n, K]: how often the output contains each of `output_ids`; padding has the count of
    its id."""


def penalize(
    logits: Tensor, penalties: BatchPenalties, token_ids: Tensor, mask: Tensor, rows: Tensor
) -> None:
    """Apply the penalties to `logits` float [R, V] of a batch's trees, in place.

    `token_ids` int64 [bs, D] are the tokens of the nodes. `mask` bool [bs, D, D] is true at
    [b, i, j] if node j is node i or an ancestor of it. `rows` int64 [bs, D] is the row of each
    node; nodes that share a row must have one mask. Nothing synchronises the host.
    """
    draft_ids = token_ids[penalties.rows, 1:]
    behind = mask[penalties.rows, :, 1:].float()
    ids = torch.cat((penalties.output_ids, draft_ids), 1)
    same = (draft_ids.unsqueeze(2) == ids.unsqueeze(1)).float()
    known = same[:, :, : penalties.output_ids.shape[1]] * penalties.output_counts.unsqueeze(1)
    committed = torch.cat((penalties.output_counts, known.amax(2)), 1)
    counts = committed.unsqueeze(1) + behind @ same

    def per_node(values: Tensor) -> Tensor:
        return values.view(-1, 1, 1)

    nodes = rows[penalties.rows].unsqueeze(2)
    # A row or an id may occur twice. Its entries have equal counts, so they write equal logits.
    at = nodes, ids.unsqueeze(1)
    part = logits[at].float()
    said = counts > 0
    additive = counts * per_node(penalties.frequency) + said * per_node(penalties.presence)
    repetition = per_node(penalties.repetition)
    reduced = part - additive
    scaled = where(reduced < 0, reduced * repetition, reduced / repetition)
    logits[at] = where(said, scaled, part).to(logits.dtype)
    if penalties.stop_ids.shape[1]:
        lengths = penalties.output_lens.unsqueeze(1) + behind.sum(2)
        early = lengths < penalties.min_new_tokens.unsqueeze(1)
        at = nodes, penalties.stop_ids.unsqueeze(1)
        logits[at] = logits[at].masked_fill(early.unsqueeze(2), float("-inf"))
