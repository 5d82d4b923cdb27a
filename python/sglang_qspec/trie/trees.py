"""The draft trees of a batch, and the arrays in which SGLang's tree verification reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.trie import _native
from sglang_qspec.trie.source import Source
from sglang_qspec.trie.tree import DraftTree


class TreeLayout(NamedTuple):
    """Links and masks of `bs` trees of common width D."""

    mask: NDArray[np.bool_]
    """[bs, D, D]: [b, i, j] where node j is node i or one of its ancestors."""
    depths: NDArray[np.int64]
    """[bs, D]: edges from the root; the position of a node is the sequence length plus this."""
    next_token: NDArray[np.int64]
    """[bs, D]: the first child of each node, or -1, which is what SGLang's kernels read."""
    next_sibling: NDArray[np.int64]
    """[bs, D]: the next child of the same parent, or -1."""


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """A batch of `bs` trees, one a row, padded to the common width D. See `DraftTree`.

    Padding continues the last node (always a leaf) as a chain that repeats its token. It takes part
    in the pass, so its row of the mask must not be empty and it must have no siblings; but it is
    not linked to the tree, so it cannot be accepted.
    """

    token_ids: NDArray[np.int32]
    """[bs, D]"""
    parents: NDArray[np.int32]
    """[bs, D]; 0 for node 0."""
    sources: NDArray[np.uint8]
    """[bs, D]: `Source` by number."""
    scores: NDArray[np.float32]
    """[bs, D]; 0 for padding."""
    sizes: NDArray[np.int32]
    """[bs]: nodes that are not padding, the root included."""

    @staticmethod
    def of(trees: Sequence[DraftTree], width: int) -> DraftTrees:
        """Trees one by one as a batch; of a larger one its best `width` nodes."""
        if width < 1:
            raise ValueError(f"width is {width}, but must be at least 1")
        token_ids: list[tuple[int, ...]] = []
        parents: list[tuple[int, ...]] = []
        sources: list[tuple[int, ...]] = []
        scores: list[tuple[float, ...]] = []
        for tree in trees:
            size = min(len(tree), width)
            pads = width - size
            token_ids.append(tree.token_ids[:size] + tree.token_ids[size - 1 : size] * pads)
            parents.append(tree.parents[:size] + tuple(range(size - 1, width - 1)))
            sources.append(tree.sources[:size] + tree.sources[size - 1 : size] * pads)
            scores.append(tree.scores[:size] + (0.0,) * pads)
        shape = (len(trees), width)
        return DraftTrees(
            np.array(token_ids, dtype=np.int32).reshape(shape),
            np.array(parents, dtype=np.int32).reshape(shape),
            np.array(sources, dtype=np.uint8).reshape(shape),
            np.array(scores, dtype=np.float32).reshape(shape),
            np.array([min(len(tree), width) for tree in trees], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, row: int) -> DraftTree:
        size = self.sizes[row]
        return DraftTree(
            tuple(self.token_ids[row, :size].tolist()),
            tuple(self.parents[row, :size].tolist()),
            tuple(map(Source, self.sources[row, :size].tolist())),
            tuple(self.scores[row, :size].tolist()),
        )

    @property
    def width(self) -> int:
        """D"""
        return self.token_ids.shape[1]

    def best(self, width: int) -> DraftTrees:
        """The trees of the `width` likeliest nodes of each."""
        if width >= self.width:
            return self
        return DraftTrees(
            self.token_ids[:, :width],
            self.parents[:, :width],
            self.sources[:, :width],
            self.scores[:, :width],
            np.minimum(self.sizes, np.int32(width)),
        )

    def lay_out(self) -> TreeLayout:
        """Where each node hangs, as arrays."""
        return TreeLayout(*_native.lay_out(self.parents, self.sizes))

    def count_by_source(self) -> dict[Source, int]:
        """Draft tokens of each source, without roots and padding."""
        return dict(zip(Source, _native.count_by_source(self.sources, self.sizes), strict=True))

    def count_by_position(
        self,
        accepted: Sequence[Sequence[int]],
        judged: NDArray[np.int64],
        right: NDArray[np.int64],
    ) -> None:
        """Add what the target said of these trees, given the `accepted` nodes of each in order.

        Both counts are [len(Source), positions], the last position with all behind it. A node is
        `judged` at position p if its parent is the root (p = 1) or the accepted node of position
        p - 1: the target chose the token there, and the node is `right` if it has that token. What
        hangs from a rejected node was not judged.
        """
        _native.count_by_position(self.parents, self.sources, self.sizes, accepted, judged, right)
