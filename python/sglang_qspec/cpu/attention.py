"""Attention over SGLang's slot-wise KV cache, for a batch at a time.

The cache keeps the keys of every position in a slot of its own, [slots, kv_heads, head_dim], and
a request's positions are scattered over it. `plan_rows` works out once per forward pass which
slots each request reads and what each of its query rows may see; `attend_rows` then needs per
layer two gathers, two batched products and a softmax, whatever the batch. It serves decode
(one query row per request), tree verification and short extends; `attend_block` serves long
prompts, request by request.

Grouped-query attention is folded into the query rows: the heads that share a key are rows of one
product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_LENGTH_STEP = 64
"""Half-precision plans cover a multiple of this many positions: oneDNN compiles its kernels anew
for every shape it meets, which costs more than the product; float32 products are not compiled."""

_QUERY_BLOCK = 512
"""Query rows that one call to the fused kernel takes in a long extend; bounds its mask."""


@dataclass(frozen=True)
class RowPlan:
    """What the query rows of one forward pass read.

    `slots` int64 [B * kv_heads * T]: places in the cache seen as [slots * kv_heads, head_dim],
    so that what is gathered lies head by head. `bias` [B, 1, 1, Q, T] in the cache's dtype is 0
    where a row may look and -inf elsewhere, None where all rows see all T positions. `taken`
    int64 [B * Q] are the token rows that the B * Q query rows come from, and `given` int64
    [tokens] the query rows that hold each token's result; None where they are the same.
    """

    requests: int
    rows: int
    positions: int
    slots: Tensor
    bias: Tensor | None
    taken: Tensor | None = None
    given: Tensor | None = None


def plan_rows(
    slots: Tensor,
    kv_lens: Tensor,
    rows: int,
    kv_heads: int,
    dtype: torch.dtype,
    visible: Tensor | None = None,
    window: int | None = None,
    row_positions: Tensor | None = None,
) -> RowPlan:
    """Plan B requests with `rows` query rows each over their KV slots.

    `slots` int [B, T] are the cache slots of each request's positions, meaningful below
    `kv_lens` int64 [B]. The last `rows` positions of a request are the query rows themselves,
    and `visible` bool [B, Q, Q] says which of them each row sees (None: rows == 1, itself).
    With a `window`, a row at `row_positions` int64 [B, Q] sees only positions at most `window`
    before its own.
    """
    requests, positions = slots.shape
    slots = slots.long()
    if dtype != torch.float32 and positions % _LENGTH_STEP:
        positions += _LENGTH_STEP - positions % _LENGTH_STEP
        slots = pad(slots, (0, positions - slots.shape[1]))
    place = torch.arange(positions)
    seen: Tensor | None = None
    if bool((kv_lens < positions).any()):
        inside = place < kv_lens.unsqueeze(1)
        # A request's own first slot stands in for what it does not have: finite, then masked.
        slots = torch.where(inside, slots, slots[:, :1])
        seen = inside.unsqueeze(1).expand(requests, rows, positions)
    if visible is not None:
        first = (kv_lens - rows).view(-1, 1, 1)
        own = (place - first).clamp(0, rows - 1).expand(requests, rows, positions)
        mine = visible.gather(2, own)
        tree = (place < first) | (mine & (place < kv_lens.view(-1, 1, 1)))
        seen = tree if seen is None else seen & tree
    if window is not None and row_positions is not None:
        near = place >= row_positions.unsqueeze(2) - window
        seen = near if seen is None else seen & near
    bias = None
    if seen is not None:
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
        bias = bias.view(requests, 1, 1, rows, positions)
    heads = torch.arange(kv_heads).view(1, kv_heads, 1)
    flat = (slots.unsqueeze(1) * kv_heads + heads).flatten()
    return RowPlan(requests, rows, positions, flat, bias)


def attend_rows(
    plan: RowPlan, query: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float = 0.0
) -> Tensor:
    """Attend with the rows of `plan`.

    `query` [tokens, heads, head_dim]; `keys` [slots, kv_heads, head_dim] and `values` [slots,
    kv_heads, value_dim] are one layer's whole cache. `cap` > 0 bounds scores by cap * tanh(s /
    cap). Returns [tokens, heads, value_dim].
    """
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = values.shape[1:]
    batch, rows, length = plan.requests, plan.rows, plan.positions
    group = heads // kv_heads
    if plan.taken is not None:
        query = query.index_select(0, plan.taken)
    query = (query * scale).view(batch, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch * kv_heads, group * rows, head_dim)
    key = keys.view(-1, head_dim).index_select(0, plan.slots).to(query.dtype)
    value = values.view(-1, value_dim).index_select(0, plan.slots).to(query.dtype)
    scores = torch.bmm(query, key.view(batch * kv_heads, length, head_dim).transpose(1, 2))
    if cap > 0.0:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if plan.bias is not None:
        scores.view(batch, kv_heads, group, rows, length).add_(plan.bias)
    mixed = torch.bmm(torch.softmax(scores, -1), value.view(batch * kv_heads, length, value_dim))
    mixed = mixed.view(batch, kv_heads, group, rows, value_dim).permute(0, 3, 1, 2, 4)
    output = mixed.reshape(batch * rows, heads, value_dim)
    return output if plan.given is None else output.index_select(0, plan.given)


def attend_block(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend causally with the last n positions of one request.

    `query` [n, heads, head_dim] are the last n of the `slots` int64 [T] positions of a request;
    `keys` and `values` as in `attend_rows`. The work is n * T, not T * T. Returns [n, heads,
    value_dim].
    """
    new, total = query.shape[0], slots.shape[0]
    grouped = query.shape[1] != keys.shape[1]
    key = keys.index_select(0, slots).to(query.dtype).transpose(0, 1).unsqueeze(0)
    value = values.index_select(0, slots).to(query.dtype).transpose(0, 1).unsqueeze(0)
    rows = query.transpose(0, 1).unsqueeze(0)
    if new == total and window is None:
        output = scaled_dot_product_attention(
            rows, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return output.squeeze(0).transpose(0, 1)
    parts = []
    for start in range(0, new, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, new)
        reach = total - new + end
        place = torch.arange(reach)
        own = torch.arange(reach - (end - start), reach).unsqueeze(1)
        seen = place <= own
        if window is not None:
            seen &= place >= own - window
        parts.append(
            scaled_dot_product_attention(
                rows[:, :, start:end],
                key[:, :, :reach],
                value[:, :, :reach],
                attn_mask=seen,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)
