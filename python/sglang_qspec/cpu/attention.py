"""Batched attention on a CPU over SGLang's slot-wise KV cache.

The cache [slots, kv_heads, head_dim] has one slot per token position, and the slots of a request
are scattered. A query row is one new token of a request. Once per forward pass, `plan_rows` finds
the slots that each request reads and the positions that each query row may see. In each layer,
`attend_rows` then takes two gathers, two batched products and a softmax. It serves decode (one
query row per request), tree verification and short extends. `attend_block` serves long prompts, one
request at a time.

Heads that share a key (grouped-query attention) are rows of one matrix product. In decode and
verification, requests that share the slots of a long prefix are rows of one product too
(`SharedPrefixes`). So completions of one prompt, or requests with the same system prompt, read the
prefix once.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_LENGTH_STEP = 64
"""Half-precision plans are padded to a multiple of this number of positions. oneDNN compiles a
kernel for each new half-precision shape, and the compilation takes longer than the product."""

_QUERY_BLOCK = 512
"""Maximum number of query rows per call of the fused kernel in a long extend; limits its mask."""


_SHARED = 32
"""Minimum length of a shared prefix in positions."""

_SAVED = 4096
"""Minimum number of positions, over all requests, that sharing must save to pay for its calls."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of requests with a common prefix of KV slots.

    There are G groups of at most R requests, with at most P common positions. `slots` int64
    [G * kv_heads * P] are cache indices as in `RowPlan`; the slots of the plan itself then leave
    out the prefixes. `members` int64 [G * R] are the requests of each group, padded with any
    request. `place` int64 [B] is the index of each request in `members`. `bias` [B, 1, 1, P] is 0
    at positions of the request's prefix and -inf elsewhere.
    """

    groups: int
    size: int
    positions: int
    slots: Tensor
    members: Tensor
    place: Tensor
    bias: Tensor


@dataclass(frozen=True)
class RowPlan:
    """The cache indices and masks of the B * Q query rows of one forward pass.

    `slots` int64 [B * kv_heads * T] are indices into the cache viewed as [slots * kv_heads,
    head_dim], so that gathered keys lie head by head. `bias` [B, 1, 1, Q, T] is 0 where a query row
    sees a position and -inf elsewhere; None if all rows see all T positions. `taken` int64 [B * Q]
    is the token of each query row, and `given` int64 [tokens] the query row of each token; None if
    query rows and tokens are the same.
    """

    requests: int
    rows: int
    positions: int
    slots: Tensor
    bias: Tensor | None
    taken: Tensor | None = None
    given: Tensor | None = None
    shared: SharedPrefixes | None = None


def plan_sharing(
    slots: Tensor,
    kv_lens: Tensor,
    rows: int,
    kv_heads: int,
    dtype: torch.dtype,
    visible: Tensor | None = None,
) -> RowPlan:
    """Like `plan_rows` without a window, but read shared prefixes once if that is faster."""
    slots = slots.long()
    found = _shared_prefixes(slots, kv_lens - rows)
    if found is None:
        return plan_rows(slots, kv_lens, rows, kv_heads, dtype, visible)
    group_of, prefix = found
    requests = slots.shape[0]
    rest = kv_lens - prefix
    own = torch.arange(int(rest.max())) + prefix.unsqueeze(1)
    own = slots.gather(1, own.clamp_(max=slots.shape[1] - 1))
    plan = plan_rows(own, rest, rows, kv_heads, dtype, visible)

    sizes = group_of.bincount()
    groups, size = sizes.shape[0], int(sizes.max())
    order = group_of.argsort(stable=True)
    rank = torch.arange(requests) - (sizes.cumsum(0) - sizes)[group_of[order]]
    place = torch.empty_like(order)
    place[order] = group_of[order] * size + rank
    members = torch.zeros(groups * size, dtype=torch.int64)
    members[place] = torch.arange(requests)

    positions = _padded(int(prefix.max()), dtype)
    common = slots[members.view(groups, size)[:, 0], : min(positions, slots.shape[1])]
    common = pad(common, (0, positions - common.shape[1]))
    common = torch.where(torch.arange(positions) < prefix[members[::size]].unsqueeze(1), common, 0)
    seen = torch.arange(positions) < prefix.unsqueeze(1)
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    flat = _flat_places(common, kv_heads)
    bias = bias.view(requests, 1, 1, positions)
    return replace(plan, shared=SharedPrefixes(groups, size, positions, flat, members, place, bias))


def _shared_prefixes(slots: Tensor, lens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return group and shared prefix length of each request, int64 [B] each.

    Returns None if sharing saves too few positions.

    `lens` int64 [B] limits the prefix to positions that all query rows of a request see. A slot
    holds one position of one text. So requests that share the slot of a position also share the
    slots of all positions before it.
    """
    requests, positions = slots.shape
    if requests < 2 or positions <= _SHARED:
        return None
    # A request that is too short gets a group of its own.
    key = torch.where(lens >= _SHARED, slots[:, _SHARED - 1], -1 - torch.arange(requests))
    key, group_of = key.unique(return_inverse=True)
    if key.shape[0] == requests:
        return None
    first = torch.full((key.shape[0],), requests).scatter_reduce_(
        0, group_of, torch.arange(requests), "amin"
    )
    same = slots == slots[first[group_of]]
    same &= torch.arange(positions) < lens.unsqueeze(1)
    common = same.int().cumprod(1).sum(1)
    shortest = torch.full((key.shape[0],), positions).scatter_reduce_(0, group_of, common, "amin")
    shortest[group_of.bincount() < 2] = 0
    prefix = shortest[group_of]
    left = key.shape[0] * int(shortest.max()) + requests * int((lens - prefix).max())
    return (group_of, prefix) if requests * positions - left >= _SAVED else None


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

    `slots` int [B, T] are the cache slots of each request's positions. `kv_lens` int64 [B] are the
    numbers of positions; further slots have no meaning. The last `rows` positions of a request are
    its query rows.
    `visible` bool [B, Q, Q] says which query rows each row sees; it may be None if `rows` is 1.
    With a `window`, a row at `row_positions` int64 [B, Q] sees only positions at most `window`
    before its own.
    """
    requests, positions = slots.shape
    slots = pad(slots.long(), (0, _padded(positions, dtype) - positions))
    positions = slots.shape[1]
    place = torch.arange(positions)
    seen: Tensor | None = None
    if bool((kv_lens < positions).any()):
        inside = place < kv_lens.unsqueeze(1)
        # Masked positions read the request's first slot, because masked values must be finite.
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
    return RowPlan(requests, rows, positions, _flat_places(slots, kv_heads), bias)


def _padded(positions: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return positions
    return -(-positions // _LENGTH_STEP) * _LENGTH_STEP


def _flat_places(slots: Tensor, kv_heads: int) -> Tensor:
    """Head by head, the indices of `slots` [N, T] in the cache as [slots * kv_heads, head_dim]."""
    heads = torch.arange(kv_heads).view(1, kv_heads, 1)
    return (slots.unsqueeze(1) * kv_heads + heads).flatten()


def attend_rows(
    plan: RowPlan, query: Tensor, keys: Tensor, values: Tensor, scale: float, cap: float = 0.0
) -> Tensor:
    """Compute the attention of the query rows of `plan` in one layer.

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
    value = value.view(batch * kv_heads, length, value_dim)
    if plan.shared is None:
        mixed = torch.bmm(torch.softmax(scores, -1), value)
    else:
        mixed = _mix_with_prefixes(plan.shared, scores, value, query, keys, values, cap)
    mixed = mixed.view(batch, kv_heads, group, rows, value_dim).permute(0, 3, 1, 2, 4)
    output = mixed.reshape(batch * rows, heads, value_dim)
    return output if plan.given is None else output.index_select(0, plan.given)


def _mix_with_prefixes(
    shared: SharedPrefixes,
    scores: Tensor,
    value: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cap: float,
) -> Tensor:
    """Compute attention over shared prefixes and own positions, with one softmax over both.

    `scores` [B * kv_heads, group, T] and `value` [B * kv_heads, T, value_dim] belong to the own
    positions of each request. `query` [B * kv_heads, group, head_dim] is scaled. `group` is the
    number of query rows of all heads that share a key. Returns [B * kv_heads, group, value_dim].
    """
    kv_heads, head_dim = keys.shape[1:]
    group, own = scores.shape[1:]
    batch = shared.place.shape[0]
    groups, size, length = shared.groups, shared.size, shared.positions

    def gathered(rows: Tensor) -> Tensor:
        """Reorder [B * kv_heads, group, x] by groups: [G * kv_heads, R * group, x]."""
        x = rows.shape[-1]
        rows = rows.reshape(batch, -1).index_select(0, shared.members)
        rows = rows.view(groups, size, kv_heads, group, x).transpose(1, 2)
        return rows.reshape(groups * kv_heads, size * group, x)

    def spread(rows: Tensor) -> Tensor:
        """Invert `gathered`: from [G * kv_heads, R * group, x] to [B * kv_heads, group, x]."""
        x = rows.shape[-1]
        rows = (
            rows.view(groups, kv_heads, size, group, x)
            .transpose(1, 2)
            .reshape(-1, kv_heads * group * x)
        )
        return rows.index_select(0, shared.place).view(batch * kv_heads, group, x)

    key = keys.view(-1, head_dim).index_select(0, shared.slots).to(query.dtype)
    before = torch.bmm(
        gathered(query), key.view(groups * kv_heads, length, head_dim).transpose(1, 2)
    )
    if cap > 0.0:
        before = before.div_(cap).tanh_().mul_(cap)
    before = spread(before)
    before.view(batch, kv_heads, group, length).add_(shared.bias)
    weights = torch.softmax(torch.cat((before, scores), -1), -1)
    of_prefix, of_own = weights.split((length, own), -1)
    prefix = values.view(-1, values.shape[2]).index_select(0, shared.slots).to(query.dtype)
    mixed = spread(torch.bmm(gathered(of_prefix), prefix.view(groups * kv_heads, length, -1)))
    return mixed.add_(torch.bmm(of_own, value))


def attend_block(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute the causal attention of the last n positions of one request.

    `query` [n, heads, head_dim] belongs to the last n of the T positions; `slots` int64 [T] are the
    cache slots of all. `keys` and `values` are as in `attend_rows`. The work is proportional to
    n * T. Returns [n, heads, value_dim].
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
