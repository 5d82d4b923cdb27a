"""From draft trees to the tensors that SGLang's tree verification reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_qspec.trie import DraftTree, PackedTrees, pack


@dataclass(frozen=True)
class VerifyPlan:
    """One pass over `bs` trees of common width D, on the host."""

    width: int
    packed: PackedTrees
    next_token: NDArray[np.int64]
    """[bs, D]: the first child of each node, or -1, which is what SGLang's kernels read."""
    next_sibling: NDArray[np.int64]
    """[bs, D]: the next child of the same parent, or -1."""

    def to_device(self, seq_lens: torch.Tensor, device: str, full_mask: bool) -> NgramVerifyInput:
        """The verify input; `seq_lens` [bs] int64 excludes the drafts.

        `full_mask`: GPU backends take each request's [D, seq_len + D] mask, CPU ones [D, D].
        """
        bs, width = self.next_token.shape

        def put(array: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        mask = torch.from_numpy(self.packed.mask)
        if full_mask:
            mask = _with_prefix(mask, seq_lens.cpu())
        positions = put(self.packed.depths) + seq_lens.to(torch.int64).unsqueeze(1)
        return NgramVerifyInput(
            draft_token=put(self.packed.token_ids),
            custom_mask=mask.flatten().to(device, non_blocking=True),
            positions=positions.flatten(),
            retrieve_index=torch.arange(bs * width, device=device).view(bs, width),
            retrieve_next_token=put(self.next_token),
            retrieve_next_sibling=put(self.next_sibling),
            draft_token_num=width,
        )


def plan(trees: Sequence[DraftTree], width: int) -> VerifyPlan:
    """Lay out one tree per request, of at most `width` nodes, in `width` columns.

    Padding is not linked to the tree: it takes part in the pass, but cannot be accepted, so a
    request that must not speculate does not.
    """
    packed = pack(trees, width)
    sizes = np.array([len(tree) for tree in trees])
    return VerifyPlan(width, packed, *_links(packed.parents, sizes))


def _links(
    parents: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First child and next sibling of every node, both [bs, D].

    In the order (request, parent, node), a node whose predecessor has the same parent is that
    predecessor's sibling, and any other is its parent's first child.
    """
    bs, width = parents.shape
    next_token = np.full((bs, width), -1, dtype=np.int64)
    next_sibling = np.full((bs, width), -1, dtype=np.int64)
    rows, nodes = np.nonzero(np.arange(1, width) < sizes[:, None])
    nodes = nodes + 1
    above = parents[rows, nodes]
    order = np.lexsort((nodes, above, rows))
    rows, nodes, above = rows[order], nodes[order], above[order]
    sibling = np.zeros(len(rows), dtype=bool)
    sibling[1:] = (rows[1:] == rows[:-1]) & (above[1:] == above[:-1])
    later = np.nonzero(sibling)[0]
    next_sibling[rows[later], nodes[later - 1]] = nodes[later]
    next_token[rows[~sibling], above[~sibling]] = nodes[~sibling]
    return next_token, next_sibling


def _with_prefix(mask: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """[bs, D, D] -> flat masks of [D, seq_len + D] a request, true over the whole prefix."""
    width = mask.shape[1]
    parts = [
        torch.cat((torch.ones(width, int(seq_len), dtype=torch.bool), own), dim=1).flatten()
        for own, seq_len in zip(mask, seq_lens, strict=True)
    ]
    return torch.cat(parts)
