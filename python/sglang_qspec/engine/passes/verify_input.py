"""Builds the tensors of SGLang's tree verification from draft trees.

One transfer brings the trees to the device. Its size does not depend on the lengths of the texts,
because the device itself builds the masks that cover the texts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor

from sglang_qspec.engine.passes.staging import stage
from sglang_qspec.trie import DraftTrees


class TreeVerifyInput(NgramVerifyInput):
    """SGLang's input of a verify pass, with the mask of the trees alone."""

    def __init__(self, tree_mask: Tensor, **tensors: Any) -> None:
        super().__init__(**tensors)
        self.tree_mask = tree_mask
        """bool [bs, D, D]: as in `trie.TreeLayout`."""


def verify_input_of(
    trees: DraftTrees,
    seq_lens: Tensor,
    device: torch.device | str,
    *,
    full_mask: bool,
    total_len: int | None = None,
) -> TreeVerifyInput:
    """The input of one pass over `trees`; `seq_lens` int64 [bs] counts the tokens before the trees.

    The mask of a request is [D, seq_len + D] with `full_mask`, otherwise [D, D]
    (`passes.tree_attention`). D is the width of the trees. `total_len` is the sum of `seq_lens`;
    without it a full mask synchronises the host.
    """
    bs, width = trees.token_ids.shape
    layout = trees.lay_out()
    token_ids, depths, next_token, next_sibling, tree_mask = stage(
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
    return TreeVerifyInput(
        tree_mask,
        draft_token=token_ids.flatten(),
        custom_mask=mask.flatten(),
        positions=positions.flatten(),
        retrieve_index=torch.arange(bs * width, device=device).view(bs, width),
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        draft_token_num=width,
    )


def _with_prefix(mask: Tensor, seq_lens: Tensor, total: int) -> Tensor:
    """Add the prefix to masks [bs, D, D]; returns [D, seq_len + D] of each request, flat.

    `total` is the sum of `seq_lens` int64 [bs].
    """
    bs, width, _ = mask.shape
    lens = seq_lens + width
    first = (lens.cumsum(0) - lens) * width + seq_lens
    nodes = torch.arange(width, device=mask.device)
    # The place of entry [i, j] of a request's tree, behind the prefix of row i.
    rows = first.unsqueeze(1) + lens.unsqueeze(1) * nodes
    places = rows.unsqueeze(2) + nodes
    full = torch.ones(width * (total + bs * width), dtype=torch.bool, device=mask.device)
    return full.index_put_((places,), mask)
