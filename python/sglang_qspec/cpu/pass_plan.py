"""Composes the attention of a whole pass, with few calls and little padding.

The requests of a pass may have different numbers of new tokens, and some may share a long prefix,
such as a system prompt. `plan_pass` makes these plans (`RowPlan`) for a pass:

- one or two groups of requests with similar numbers of new tokens, each over its own positions;
- the shared prefixes, each read once. All rows that see a prefix are rows of one matrix product, so
  rows of a prefix need no padding to the longest request.

`attend_pass` merges the two results of a row by the logarithms of their softmax denominators, as
flash attention merges blocks (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_qspec.cpu.attention import (
    Heads,
    RowPlan,
    attend_rows,
    flat_places,
    mask_of,
    padded,
    plan_rows,
)

_FEWEST_SAVED = 16
"""Minimum number of padded query rows that a second group of requests must save, because each group
takes its own torch calls."""

_SHARED = 32
"""Minimum length of a shared prefix in positions."""

_SAVED = 4096
"""Minimum number of positions, over all requests, that sharing must save to pay for its calls."""


@dataclass(frozen=True)
class PassPlan:
    """The attention of all tokens of a pass in layers of one kind."""

    groups: tuple[RowPlan, ...]
    """Groups of requests, over the positions that are not in a shared prefix."""
    order: Tensor | None
    """int64 [tokens]: the place of each token in the results of all groups; None for one group."""
    prefixes: RowPlan | None
    """Tokens over shared prefixes; None if the requests share too little."""
    sharing: Tensor | None
    """int64 [n]: tokens that `prefixes` has results for; None for all tokens."""


def may_share(requests: int, positions: int) -> bool:
    """Whether this number of requests with up to `positions` each can save enough by sharing."""
    return requests > 1 and positions > _SHARED and requests * positions >= _SAVED


def plan_pass(
    slots: Tensor,
    kv_lens: Tensor,
    new_lens: Sequence[int],
    heads: Heads,
    dtype: torch.dtype,
    *,
    visible: Tensor | None = None,
    window: int | None = None,
    shares: bool = True,
) -> PassPlan:
    """Plan the attention of requests with `new_lens` new tokens each, packed one after another.

    `slots` int [B, T] and `kv_lens` int64 [B] are as in `plan_rows`; the new tokens are at the last
    positions. `visible` bool [B, D, D] says which of its new tokens each new token sees; it may be
    None if no request has more than one. With a `window` no prefix is shared. `shares` False never
    looks for shared prefixes.
    """
    lens = torch.tensor(new_lens)
    slots = slots.long()
    prefixes = sharing = None
    found = _shared_prefixes(slots, kv_lens - lens) if shares and window is None else None
    if found is not None:
        prefixes, sharing = _plan_prefixes(slots, *found, lens, heads, dtype)
        prefix = found[1]
        kv_lens = kv_lens - prefix
        own = torch.arange(int(kv_lens.max())) + prefix.unsqueeze(1)
        slots = slots.gather(1, own.clamp_(max=slots.shape[1] - 1))
    starts = lens.cumsum(0) - lens
    groups, tokens = [], []
    members = _similar(new_lens)
    for rows in members:
        chosen = torch.tensor(rows)
        longest = int(kv_lens[chosen].max())
        plan = plan_rows(
            slots[chosen, :longest],
            kv_lens[chosen],
            int(lens[chosen].max()),
            heads,
            dtype,
            _shifted(visible, lens, chosen),
            window,
        )
        groups.append(_placed(plan, starts[chosen], lens[chosen], packed=len(members) == 1))
        for row in rows:
            tokens.append(torch.arange(int(lens[row])) + starts[row])
    order = torch.cat(tokens).argsort() if len(members) > 1 else None
    return PassPlan(tuple(groups), order, prefixes, sharing)


def attend_pass(
    plan: PassPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention of all tokens of a pass in one layer.

    Arguments are as in `attend_rows`. Returns [tokens, heads, value_dim].
    """
    results = [attend_rows(group, query, keys, values, scale, cap, sinks) for group in plan.groups]
    mixed, logs = results[0]
    if plan.order is not None:
        mixed = torch.cat([one for one, _ in results])[plan.order]
        logs = torch.cat([one for _, one in results])[plan.order]
    if plan.prefixes is None:
        return mixed
    before, before_logs = attend_rows(plan.prefixes, query, keys, values, scale, cap)
    if plan.sharing is None:
        return _merged(mixed, logs, before, before_logs)
    own, own_logs = mixed[plan.sharing], logs[plan.sharing]
    return mixed.index_copy_(0, plan.sharing, _merged(own, own_logs, before, before_logs))


def _merged(mixed: Tensor, logs: Tensor, before: Tensor, before_logs: Tensor) -> Tensor:
    """Attention over two sets of positions, from the attention over each of them."""
    share = torch.sigmoid(before_logs - logs).unsqueeze(-1)
    return torch.lerp(mixed.float(), before.float(), share).to(mixed.dtype)


def _similar(lens: Sequence[int]) -> list[list[int]]:
    """The requests in one group, or in two if that saves at least `_FEWEST_SAVED` padded rows.

    `lens` has the number of new tokens of each request. A group is padded to its largest number.
    """
    order = sorted(range(len(lens)), key=lens.__getitem__)
    longest = max(lens, default=0)
    most, first = len(lens) * longest - _FEWEST_SAVED, 0
    for count in range(1, len(order)):
        rows = count * lens[order[count - 1]] + (len(order) - count) * longest
        if rows <= most:
            most, first = rows - 1, count
    return [order[:first], order[first:]] if first else [list(range(len(lens)))]


def _shifted(visible: Tensor | None, lens: Tensor, chosen: Tensor) -> Tensor | None:
    """`visible` bool [n, Q, Q] of the `chosen` requests, where each has its new tokens last.

    Q is the largest number of new tokens among them. A request with fewer new tokens gets extra
    rows before its own rows. The extra rows repeat its first new token, and their columns are
    committed text, which all rows see as they see the first new token.
    """
    lens = lens[chosen]
    rows = int(lens.max())
    if visible is None or rows == 1:
        return None
    node = (torch.arange(rows) - (rows - lens).unsqueeze(1)).clamp(min=0)
    return visible[chosen.view(-1, 1, 1), node.unsqueeze(2), node.unsqueeze(1)]


def _placed(plan: RowPlan, starts: Tensor, lens: Tensor, *, packed: bool) -> RowPlan:
    """The plan with the tokens of its query rows, and the query rows of its results.

    `starts` and `lens` int64 [n] are the place of each request's first token in the pass and its
    number of tokens. With `packed` they are all requests of the pass, in order.
    """
    padding = plan.rows - lens
    even = not bool(padding.any())
    if packed and even:
        return plan
    offset = torch.arange(plan.rows) - padding.unsqueeze(1)
    taken = (starts.unsqueeze(1) + offset.clamp(min=0)).flatten()
    given = None if even else (offset >= 0).flatten().nonzero().flatten()
    return replace(plan, taken=taken, given=given)


def _shared_prefixes(slots: Tensor, lens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return group and shared prefix length of each request, int64 [B] each.

    Returns None if sharing saves too few positions.

    `lens` int64 [B] limits the prefix to positions that all query rows of a request see. A slot
    holds one position of one text. So requests that share the slot of a position also share the
    slots of all positions before it.
    """
    requests, positions = slots.shape
    if not may_share(requests, positions):
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


def _plan_prefixes(
    slots: Tensor, group_of: Tensor, prefix: Tensor, lens: Tensor, heads: Heads, dtype: torch.dtype
) -> tuple[RowPlan, Tensor | None]:
    """Plan the tokens that see a shared prefix, G groups with at most R tokens each.

    `group_of` and `prefix` int64 [B] are as from `_shared_prefixes`, `lens` int64 [B] are the
    numbers of new tokens. Returns the plan, and the tokens of its results; None for all tokens.
    """
    sharing = (prefix > 0).repeat_interleave(lens).nonzero().flatten()
    _, group = group_of.repeat_interleave(lens)[sharing].unique(return_inverse=True)
    sizes = group.bincount()
    groups, size = sizes.shape[0], int(sizes.max())
    order = group.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    place = torch.empty_like(order)
    place[order] = group[order] * size + torch.arange(len(order)) - first[group[order]]
    taken = sharing[:1].repeat(groups * size)
    taken[place] = sharing
    request = torch.arange(len(lens)).repeat_interleave(lens)[sharing[order[first]]]

    positions = padded(int(prefix.max()), dtype)
    common = slots[request, : min(positions, slots.shape[1])]
    common = pad(common, (0, positions - common.shape[1]))
    seen = torch.arange(positions) < prefix[request].unsqueeze(1)
    mask = None if bool(seen.all()) else mask_of(seen.unsqueeze(1), dtype)
    common = torch.where(seen, common, common[:, :1])
    plan = RowPlan(groups, size, positions, flat_places(common, heads.keys), mask, taken, place)
    return plan, None if len(sharing) == int(lens.sum()) else sharing
