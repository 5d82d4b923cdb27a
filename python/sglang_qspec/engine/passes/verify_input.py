"""Builds the tensors of SGLang's tree verification from draft trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_qspec.trie import DraftTrees


def verify_input_of(
    trees: DraftTrees, seq_lens: torch.Tensor, device: str, *, full_mask: bool
) -> NgramVerifyInput:
    """The input of one pass over `trees`; `seq_lens` int64 [bs] counts the tokens before the trees.

    The mask of a request is [D, seq_len + D] with `full_mask`, as GPU backends read it, otherwise
    [D, D], as the CPU backend does. D is the width of the trees.
    """
    bs, width = trees.token_ids.shape
    layout = trees.lay_out()

    def put(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    mask = torch.from_numpy(layout.mask)
    if full_mask:
        mask = _with_prefix(mask, seq_lens.cpu())
    positions = put(layout.depths) + seq_lens.to(torch.int64).unsqueeze(1)
    return NgramVerifyInput(
        draft_token=put(trees.token_ids.astype(np.int64).reshape(-1)),
        custom_mask=mask.flatten().to(device, non_blocking=True),
        positions=positions.flatten(),
        retrieve_index=torch.arange(bs * width, device=device).view(bs, width),
        retrieve_next_token=put(layout.next_token),
        retrieve_next_sibling=put(layout.next_sibling),
        draft_token_num=width,
    )


def _with_prefix(mask: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Add the prefix to masks [bs, D, D]; returns [D, seq_len + D] of each request, flat."""
    width = mask.shape[1]
    parts = [
        torch.cat((torch.ones(width, int(seq_len), dtype=torch.bool), own), dim=1).flatten()
        for own, seq_len in zip(mask, seq_lens, strict=True)
    ]
    return torch.cat(parts)
