"""Batched attention on a CPU over SGLang's slot-wise KV cache.

The cache [slots, kv_heads, head_dim] has one slot per token position, and the slots of a request
are scattered. A query row is one new token of a request. Once per forward pass, `plan_rows` finds
the slots that each request reads and the positions that each query row may see. In each layer,
`attend_rows` then takes two gathers and one call of torch's flash attention. It serves decode (one
query row per request), tree verification and short extends; `pass_plan` composes these plans for a
whole pass. `attend_block` serves long prompts, one request at a time.

Heads that share a key (grouped-query attention) are rows of one matrix product.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_LENGTH_STEP = 64
"""Half-precision plans are padded to a multiple of this number of positions. oneDNN compiles a
kernel for each new half-precision shape, and the compilation takes longer than the product."""

_QUERY_BLOCK = 512
"""Maximum number of query rows per call of the fused kernel in a long extend; limits its mask."""

_MOST_KEPT = 2**20
"""Maximum number of elements of the masks of a `BlockPlan` that all layers share. Larger ones are
made in each layer, which then takes much longer than its mask."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel behind `scaled_dot_product_attention`, which also returns the logarithms of the
softmax denominators."""


@dataclass(frozen=True)
class Heads:
    """How the heads of a layer share keys and values."""

    keys: int
    """Number of heads of keys and values."""
    group: int
    """Number of query heads that share a key head."""


@dataclass(frozen=True)
class RowPlan:
    """The cache indices and masks of B * Q query rows: Q rows for each of B lists of slots.

    `slots` int64 [B * kv_heads * T] are indices into the cache viewed as [slots * kv_heads,
    head_dim], so that gathered keys lie head by head. `mask` [B, 1, Q * group or 1, T] is 0 where a
    query row sees a position and -inf elsewhere; None if all rows see all T positions. `taken`
    int64 [B * Q] is the token of each query row, and `given` int64 [n] the query row of each
    result; None if query rows are the tokens, and the results, in order.
    """

    batch: int
    rows: int
    positions: int
    slots: Tensor
    mask: Tensor | None
    taken: Tensor | None = None
    given: Tensor | None = None


def plan_rows(
    slots: Tensor,
    kv_lens: Tensor,
    rows: int,
    heads: Heads,
    dtype: torch.dtype,
    visible: Tensor | None = None,
    window: int | None = None,
) -> RowPlan:
    """Plan B requests with `rows` query rows each over their KV slots.

    `slots` int [B, T] are the cache slots of each request's positions. `kv_lens` int64 [B] are the
    numbers of positions; further slots have no meaning. The last `rows` positions of a request are
    its query rows.
    `visible` bool [B, Q, Q] says which query rows each row sees; it may be None if `rows` is 1. A
    row sees itself and its ancestors, which come before it, so their number is its depth in the
    request's tree. With a `window`, a row sees only tokens at most `window` before itself in its
    text, which is the committed text and the path to the row.
    """
    requests, positions = slots.shape
    slots = pad(slots.long(), (0, padded(positions, dtype) - positions))
    positions = slots.shape[1]
    place = torch.arange(positions)
    seen: Tensor | None = None
    if bool((kv_lens < positions).any()):
        inside = place < kv_lens.unsqueeze(1)
        # Masked positions read the request's first slot, because masked values must be finite.
        slots = torch.where(inside, slots, slots[:, :1])
        seen = inside.unsqueeze(1).expand(requests, rows, positions)
    first = (kv_lens - rows).view(-1, 1, 1)
    if visible is not None:
        own = (place - first).clamp(0, rows - 1).expand(requests, rows, positions)
        mine = visible.gather(2, own)
        tree = (place < first) | (mine & (place < kv_lens.view(-1, 1, 1)))
        seen = tree if seen is None else seen & tree
    if window is not None:
        near = _near(place, first, visible, window)
        seen = near if seen is None else seen & near
    mask = None if seen is None else mask_of(seen.repeat_interleave(heads.group, 1), dtype)
    return RowPlan(requests, rows, positions, flat_places(slots, heads.keys), mask)


def _near(place: Tensor, first: Tensor, visible: Tensor | None, window: int) -> Tensor:
    """Whether the token at each place is at most `window` before each query row, bool [B, Q, T].

    `place` int64 [T] are all places, `first` int64 [B, 1, 1] the places of the first query rows.
    Siblings have places one after another, but one position in their texts.
    """
    if visible is None:
        return place >= first - window
    rows = visible.shape[1]
    # Rows that pad a request stand for committed tokens, one position each.
    depth = torch.minimum(visible.sum(2) - 1, torch.arange(rows)).unsqueeze(1)
    own = (place - first).clamp(0, rows - 1)
    position = torch.where(place < first, place, first + depth.gather(2, own))
    return position >= first + depth.transpose(1, 2) - window


def mask_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask [B, 1, R, T] for `seen` bool [B, R, T]: 0 where a row sees a position, else -inf."""
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return mask.unsqueeze(1)


def padded(positions: int, dtype: torch.dtype) -> int:
    """The number of positions of a plan in this dtype, at least `positions`."""
    if dtype == torch.float32:
        return positions
    return -(-positions // _LENGTH_STEP) * _LENGTH_STEP


def flat_places(slots: Tensor, kv_heads: int) -> Tensor:
    """Head by head, the indices of `slots` [N, T] in the cache as [slots * kv_heads, head_dim]."""
    heads = torch.arange(kv_heads).view(1, kv_heads, 1)
    return (slots.unsqueeze(1) * kv_heads + heads).flatten()


def attend_rows(
    plan: RowPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of the query rows of `plan` in one layer.

    `query` [tokens, heads, head_dim]; `keys` [slots, kv_heads, head_dim] and `values` [slots,
    kv_heads, value_dim] are one layer's whole cache. `cap` > 0 bounds scores by cap * tanh(s /
    cap). `sinks` [heads] are the scores of attention sinks, which take a share of each softmax and
    have no value. Returns the results [n, heads, value_dim], and the logarithms of their softmax
    denominators, float32 [n, heads].
    """
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = values.shape[1:]
    group = heads // kv_heads
    if plan.taken is not None:
        query = query.index_select(0, plan.taken)
    query = query.view(plan.batch, plan.rows, kv_heads, group, head_dim).transpose(1, 2)
    query = query.reshape(plan.batch, kv_heads, -1, head_dim)
    key = keys.view(-1, head_dim).index_select(0, plan.slots).to(query.dtype)
    key = key.view(plan.batch, kv_heads, -1, head_dim)
    value = values.view(-1, value_dim).index_select(0, plan.slots).to(query.dtype)
    value = value.view(plan.batch, kv_heads, -1, value_dim)
    if cap > 0.0 or head_dim != value_dim:
        mixed, logs = _capped(query, key, value, plan.mask, scale, cap)
    else:
        mixed, logs = _flash(query, key, value, attn_mask=plan.mask, scale=scale)
    split = (plan.batch, kv_heads, plan.rows, group)
    mixed = mixed.reshape(*split, value_dim).transpose(1, 2).reshape(-1, heads, value_dim)
    logs = logs.reshape(split).transpose(1, 2).reshape(-1, heads)
    if plan.given is not None:
        mixed, logs = mixed.index_select(0, plan.given), logs.index_select(0, plan.given)
    return (mixed, logs) if sinks is None else _with_sinks(mixed, logs, sinks)


def _with_sinks(mixed: Tensor, logs: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Results and logarithms as from `attend_rows`, after the sinks have taken their share."""
    total = torch.logaddexp(logs, sinks.float())
    return (mixed * (logs - total).exp().unsqueeze(-1)).to(mixed.dtype), total


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Attention that the fused kernel lacks: with a cap, or values of another size than keys."""
    scores = torch.matmul(query * scale, key.transpose(-1, -2))
    if cap > 0.0:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores = scores.add_(mask)
    return torch.matmul(scores.softmax(-1), value), scores.float().logsumexp(-1)


class BlockPlan:
    """The plan of one request's long extend, in blocks of query rows.

    Layers with the same heads, dtype and window share it.
    """

    def __init__(
        self, slots: Tensor, new: int, heads: Heads, dtype: torch.dtype, window: int | None = None
    ) -> None:
        """`slots` int64 [T] are the cache slots of all positions; the last `new` are new."""
        self.slots = slots
        self.is_whole = new == len(slots) and window is None
        """Whether all positions are new, and each sees all before it."""
        self._new = new
        self._heads = heads
        self._dtype = dtype
        self._window = window
        self._kept: list[RowPlan] | None = None
        """The plan of each block; None if their masks are too large to be kept, or before use."""

    def blocks(self) -> Iterable[RowPlan]:
        """The plan of each block of at most _QUERY_BLOCK query rows."""
        if self._kept is not None:
            return self._kept
        if self._new * self._heads.group * len(self.slots) > _MOST_KEPT:
            return self._planned()
        self._kept = list(self._planned())
        return self._kept

    def _planned(self) -> Iterator[RowPlan]:
        end = len(self.slots) - self._new
        for rows in torch.arange(self._new).split(_QUERY_BLOCK):
            begin = 0 if self._window is None else max(0, end - self._window)
            end += len(rows)
            causal = torch.ones(1, len(rows), len(rows), dtype=torch.bool).tril()
            near, lens = self.slots[begin:end].unsqueeze(0), torch.tensor([end - begin])
            place = (near, lens, len(rows), self._heads, self._dtype)
            yield plan_rows(*place, causal, self._window)


def attend_block(
    plan: BlockPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the causal attention of the new tokens of one request.

    `query` [n, heads, head_dim] belongs to the new tokens of `plan`. The other arguments are as in
    `attend_rows`. The work is proportional to n * T, or to n times the window. Returns [n, heads,
    value_dim].
    """
    if plan.is_whole and cap == 0.0 and sinks is None:
        key, value = (
            buffer.index_select(0, plan.slots).to(query.dtype).transpose(0, 1).unsqueeze(0)
            for buffer in (keys, values)
        )
        output = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key,
            value,
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] > keys.shape[1],
        )
        return output.squeeze(0).transpose(0, 1)
    blocks = zip(plan.blocks(), query.split(_QUERY_BLOCK), strict=True)
    parts = [attend_rows(block, rows, keys, values, scale, cap, sinks)[0] for block, rows in blocks]
    return torch.cat(parts)
