"""The draft tree of one request and step, and the arrays in which a batch of them is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.trie.source import Source


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of draft tokens, flat: node i has `token_ids[i]` and hangs from `parents[i]` < i.

    Node 0 is the last committed token; it is its own parent, and its source and score (1.0) are
    not a draft's. Nodes stand in falling order of `scores`, the estimated chance that the node is
    accepted, so the first k nodes are the best tree of k nodes. Siblings have different tokens:
    tree sampling would count the probability of a repeated one twice.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[Source, ...]
    scores: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def best(self, size: int) -> DraftTree:
        """The tree of the `size` likeliest nodes, the root included."""
        if size >= len(self):
            return self
        return DraftTree(
            self.token_ids[:size], self.parents[:size], self.sources[:size], self.scores[:size]
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError where the tree is not what the class promises."""
        sizes = {len(self.token_ids), len(self.parents), len(self.sources), len(self.scores)}
        if len(sizes) != 1 or not self.token_ids:
            raise RuntimeError(f"a draft tree's fields have lengths {sorted(sizes)}")
        if self.parents[0] != 0:
            raise RuntimeError(f"the root hangs from node {self.parents[0]}")
        children: set[tuple[int, int]] = set()
        for node in range(1, len(self)):
            parent = self.parents[node]
            if not 0 <= parent < node:
                raise RuntimeError(f"node {node} hangs from node {parent}")
            if self.scores[node] > self.scores[node - 1]:
                raise RuntimeError(f"node {node} is likelier than the node before it")
            if (parent, self.token_ids[node]) in children:
                raise RuntimeError(f"node {parent} has token {self.token_ids[node]} twice")
            children.add((parent, self.token_ids[node]))


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """A batch of `bs` trees, padded to the common width D, as SGLang's tree verification wants it.

    The mask's rows are all that its `reconstruct_indices_from_tree_mask` needs.
    """

    token_ids: NDArray[np.int64]
    """[bs * D]"""
    mask: NDArray[np.bool_]
    """[bs, D, D]: [b, i, j] where node j is node i or one of its ancestors."""
    parents: NDArray[np.int64]
    """[bs, D]; 0 for node 0."""
    depths: NDArray[np.int64]
    """[bs, D]: edges from the root; the position of a node is the sequence length plus this."""


def pack(trees: Sequence[DraftTree], width: int) -> PackedTrees:
    """Write trees into arrays of `width` nodes each; of a larger tree, its best `width` nodes.

    The verifier takes every node for a guess, so padding must be a guess that may come true. It
    continues the last node (always a leaf) as a chain that repeats its token. Then a padding node
    has no sibling, so no probability is counted twice as it would be for many equal children of
    the root; it is accepted only when it is the token that the target itself takes after its
    ancestors, which is lossless; and its row of the mask is never empty.
    """
    if width < 1:
        raise ValueError(f"width is {width}, but must be at least 1")
    token_rows: list[list[int]] = []
    parent_rows: list[list[int]] = []
    for tree in trees:
        size = min(len(tree), width)
        pads = width - size
        token_rows.append([*tree.token_ids[:size], *[tree.token_ids[size - 1]] * pads])
        parent_rows.append([*tree.parents[:size], *range(size - 1, width - 1)])
    bs = len(token_rows)
    parents = np.array(parent_rows, dtype=np.int64).reshape(bs, width)
    mask = np.zeros((bs, width, width), dtype=np.bool_)
    rows = np.arange(bs)
    mask[:, 0, 0] = True
    for node in range(1, width):
        mask[:, node] = mask[rows, parents[:, node]]
        mask[:, node, node] = True
    return PackedTrees(
        token_ids=np.array(token_rows, dtype=np.int64).reshape(bs * width),
        mask=mask,
        parents=parents,
        depths=mask.sum(axis=2, dtype=np.int64) - 1,
    )
