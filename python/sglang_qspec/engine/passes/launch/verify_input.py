"""Builds the tensors of SGLang's tree verification from draft trees.

A pass runs one row for each node. The rows of one request are consecutive. In a ragged pass only
the nodes of the trees have rows, and SGLang's `RaggedVerifyLayout` describes them. In other passes
padding has rows too, so that each request has D rows. SGLang's verify kernel finds the row of each
node in `retrieve_index` [bs, D], and reports accepted rows. So both kinds of passes accept tokens
with the same code.

One transfer copies the trees to the device. Its size does not depend on the lengths of the texts,
because the device itself builds the masks that cover the texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from torch import Tensor

from sglang_qspec.transfers import to_device
from sglang_qspec.trie import DraftTrees

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class TreeVerifyInput(NgramVerifyInput):
    """SGLang's input of a verify pass over R rows.

    `draft_token` is int64 [bs * D], `positions` int64 [R]. `retrieve_index` int64 [bs, D] is the
    row of each node. Padding without its own row has the row of the tree's last node.
    """

    def __init__(
        self, tree_mask: Tensor, owners: Tensor, offsets: Tensor, input_ids: Tensor, **tensors: Any
    ) -> None:
        super().__init__(**tensors)
        self.tree_mask = tree_mask
        """bool [bs, D, D]: as in `trie.TreeLayout`. Padding without its own row has the mask of the
        tree's last node."""
        self.owners = owners
        """int64 [R]: the request of each row, in rising order."""
        self.offsets = offsets
        """int64 [R]: the index of each row's node in its tree. The index is also the place of the
        row's KV slot after the committed tokens."""
        self.input_ids = input_ids
        """int64 [R]: the token of each row."""

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return len(self.owners)

    def slots(self, batch: ScheduleBatch) -> Tensor:
        """The allocated KV slot of each row: int64 [R]."""
        slots: Tensor = batch.req_to_token_pool.req_to_token[
            batch.req_pool_indices[self.owners], batch.seq_lens[self.owners] + self.offsets
        ]
        return slots.to(torch.int64)

    def move_accepted(self, batch: ScheduleBatch, accept_index: Tensor, allocator: Any) -> None:
        """Copy the KV of the accepted nodes to the slots after the committed tokens.

        `accept_index` int [bs, D] has the rows of the accepted nodes, then -1. SGLang's
        `move_accept_tokens_to_target_kvcache` cannot be used, because it expects D rows for each
        request. Unused places copy slot 0, which no request uses, to itself.
        """
        accepted = accept_index >= 0
        slots = batch.out_cache_loc
        targets = torch.where(accepted, slots[self.retrieve_index], 0)
        sources = torch.where(accepted, slots[accept_index.clamp(min=0)], 0)
        allocator.get_kvcache().move_kv_cache(targets.flatten(), sources.flatten())


def verify_input_of(
    trees: DraftTrees,
    seq_lens: Tensor,
    device: torch.device | str,
    *,
    full_mask: bool,
    total_len: int | None = None,
) -> TreeVerifyInput:
    """The input of one pass over `trees`; `seq_lens` int64 [bs] counts the tokens before the trees.

    Ragged trees get a ragged pass, and their `custom_mask` is the `tree_mask`. For other trees, the
    mask of a request is [D, seq_len + D] with `full_mask`, and [D, D] without
    (`passes.tree_attention`). D is the width of the trees. `total_len` is the sum of `seq_lens`;
    without it, a full mask synchronises the host with the device.
    """
    if trees.ragged:
        return _ragged_input_of(trees, seq_lens, device)
    bs, width = trees.token_ids.shape
    layout = trees.lay_out()
    token_ids, depths, next_token, next_sibling, tree_mask = to_device(
        device,
        trees.token_ids.astype(np.int64),
        layout.depths,
        layout.next_token,
        layout.next_sibling,
        layout.mask,
    )
    mask = tree_mask
    if full_mask:
        total = int(seq_lens.sum()) if total_len is None else total_len
        mask = _with_prefix(tree_mask, seq_lens.to(torch.int64), total)
    positions = depths + seq_lens.to(torch.int64).unsqueeze(1)
    rows = torch.arange(bs * width, device=device)
    return TreeVerifyInput(
        tree_mask,
        owners=rows // width,
        offsets=rows % width,
        input_ids=token_ids.flatten(),
        draft_token=token_ids.flatten(),
        custom_mask=mask.flatten(),
        positions=positions.flatten(),
        retrieve_index=rows.view(bs, width),
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        draft_token_num=width,
    )


def total_len_of(batch: ScheduleBatch) -> int | None:
    """The sum of the requests' lengths in tokens; None if the host has no copy of the lengths.

    The sum comes from SGLang's copy on the host, so it does not synchronise with the device.
    """
    return None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum())


def _ragged_input_of(
    trees: DraftTrees, seq_lens: Tensor, device: torch.device | str
) -> TreeVerifyInput:
    width, starts, layout = trees.width, trees.starts, trees.lay_out()
    nodes = np.minimum(np.arange(width), trees.sizes[:, None] - 1)
    owners, offsets = (nodes == np.arange(width)).nonzero()
    lens = trees.sizes
    token_ids, depths, next_token, next_sibling, index, owner, offset, ends, mask = to_device(
        device,
        trees.token_ids.astype(np.int64),
        layout.depths[owners, offsets],
        layout.next_token,
        layout.next_sibling,
        starts[:, None] + nodes,
        owners,
        offsets,
        np.concatenate(([0], lens.cumsum())).astype(np.int32),
        np.take_along_axis(layout.mask, nodes[:, :, None], 1),
    )
    verify_input = TreeVerifyInput(
        mask,
        owners=owner,
        offsets=offset,
        input_ids=token_ids[owner, offset],
        draft_token=token_ids.flatten(),
        custom_mask=mask.flatten(),
        positions=depths + seq_lens.to(torch.int64)[owner],
        retrieve_index=index,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        draft_token_num=width,
    )
    verify_input.ragged_verify_layout = RaggedVerifyLayout(
        verify_lens=ends[1:] - ends[:-1],
        graph_num_tokens=trees.rows,
        extend_start_loc=ends[:-1],
        qo_indptr_device=ends,
        verify_lens_cpu=lens.tolist(),
        total_verify_tokens=trees.rows,
    )
    return verify_input


def _with_prefix(mask: Tensor, seq_lens: Tensor, total: int) -> Tensor:
    """Add the prefix to masks [bs, D, D]; returns [D, seq_len + D] of each request, flat.

    `total` is the sum of `seq_lens` int64 [bs].
    """
    bs, width, _ = mask.shape
    lens = seq_lens + width
    first = (lens.cumsum(0) - lens) * width + seq_lens
    nodes = torch.arange(width, device=mask.device)
    # The place of entry [i, j] of a request's tree: it follows the prefix of row i.
    rows = first.unsqueeze(1) + lens.unsqueeze(1) * nodes
    places = rows.unsqueeze(2) + nodes
    full = torch.ones(width * (total + bs * width), dtype=torch.bool, device=mask.device)
    return full.index_put_((places,), mask)
