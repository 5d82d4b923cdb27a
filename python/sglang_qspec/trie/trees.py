"""The draft trees of a batch, and the arrays that SGLang's tree verification reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.draft_source import Source
from sglang_qspec.trie import _native
from sglang_qspec.trie.tree import DraftTree


class TreeLayout(NamedTuple):
    """Links and masks of `bs` trees with the common width D."""

    mask: NDArray[np.bool_]
    """[bs, D, D]: [b, i, j] is true if node j is node i or an ancestor of node i."""
    depths: NDArray[np.int64]
    """[bs, D]: distance from the root; a node's position is the sequence length plus its depth."""
    next_token: NDArray[np.int64]
    """[bs, D]: first child of each node, or -1 for none, as SGLang's kernels expect."""
    next_sibling: NDArray[np.int64]
    """[bs, D]: next child of the same parent, or -1 for none."""


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """A batch of `bs` trees (`DraftTree`), one per array row, padded to the common width D.

    Padding continues the last node, always a leaf, as a chain that repeats its token. It is not
    linked to the tree, so it cannot be accepted. A pass runs the padding too, so that padding needs
    a nonempty mask row and no siblings. A pass over `ragged` trees runs their nodes alone.
    """

    token_ids: NDArray[np.int32]
    """[bs, D]"""
    parents: NDArray[np.int32]
    """[bs, D]: index of each node's parent; 0 for the root."""
    sources: NDArray[np.uint8]
    """[bs, D]: number of each node's `Source`."""
    scores: NDArray[np.float32]
    """[bs, D]: estimated acceptance probabilities; 0 for padding."""
    sizes: NDArray[np.int32]
    """[bs]: number of nodes, the root included and padding excluded."""
    ragged: bool = False
    """Whether a pass over the trees leaves out the padding."""

    @staticmethod
    def of(trees: Sequence[DraftTree], width: int) -> DraftTrees:
        """Batch `trees`; a larger tree is cut to its best `width` nodes.

        Raises ValueError if `width` is below 1.
        """
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

    @staticmethod
    @cache
    def roots(count: int) -> DraftTrees:
        """`count` trees of a root alone, whose token has no meaning; do not change the arrays."""
        ids, sources, scores = (
            np.zeros((count, 1), dtype) for dtype in (np.int32, np.uint8, np.float32)
        )
        return DraftTrees(ids, ids, sources, scores, np.ones(count, np.int32))

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
        """The common width D: number of nodes of each tree, padding included."""
        return self.token_ids.shape[1]

    @property
    def rows(self) -> int:
        """Number of tokens that a pass over the trees runs."""
        return int(self.sizes.sum()) if self.ragged else self.token_ids.size

    @property
    def starts(self) -> NDArray[np.int64]:
        """[bs]: place of each root among the `rows` tokens of a pass; its tree follows it."""
        if not self.ragged:
            return np.arange(len(self), dtype=np.int64) * self.width
        return np.cumsum(self.sizes, dtype=np.int64) - self.sizes

    @property
    def are_chains(self) -> bool:
        """Whether no node of any tree has two children."""
        return bool((self.parents[:, 1:] == np.arange(self.width - 1)).all())

    def best(self, width: int) -> DraftTrees:
        """These trees cut to their `width` likeliest nodes."""
        if width >= self.width:
            return self
        return DraftTrees(
            self.token_ids[:, :width],
            self.parents[:, :width],
            self.sources[:, :width],
            self.scores[:, :width],
            np.minimum(self.sizes, np.int32(width)),
        )

    def cut(self, lengths: NDArray[np.int64]) -> DraftTrees:
        """These trees, each cut to its own number of likeliest nodes, for a ragged pass.

        `lengths` [bs] are at least 1; a smaller tree keeps its size. The width is the largest size.
        """
        sizes = np.minimum(self.sizes, lengths).astype(np.int32)
        width = int(sizes.max(initial=1))
        nodes = np.arange(width, dtype=np.int32)
        padding = nodes >= sizes[:, None]
        kept = np.where(padding, sizes[:, None] - 1, nodes)
        return DraftTrees(
            np.take_along_axis(self.token_ids, kept, 1),
            np.where(padding, nodes - 1, self.parents[:, :width]),
            np.take_along_axis(self.sources, kept, 1),
            np.where(padding, np.float32(0.0), self.scores[:, :width]),
            sizes,
            ragged=True,
        )

    def chains(self) -> DraftTrees:
        """The path from the root of each tree with the most expected tokens, as trees."""
        mask = self.lay_out().mask
        expected = np.matmul(mask, self.scores[:, :, None])[:, :, 0]
        on_path = mask[np.arange(len(self)), expected.argmax(axis=1)]
        sizes = on_path.sum(axis=1, dtype=np.int32)
        # The nodes of the path come first, in their order.
        order = np.argsort(~on_path, axis=1, kind="stable")
        nodes = np.arange(self.width, dtype=np.int32)
        padding = nodes >= sizes[:, None]
        kept = np.take_along_axis(order, np.minimum(nodes, sizes[:, None] - 1), 1)
        return DraftTrees(
            np.take_along_axis(self.token_ids, kept, 1),
            np.broadcast_to(np.maximum(nodes - 1, 0), kept.shape).copy(),
            np.take_along_axis(self.sources, kept, 1),
            np.where(padding, np.float32(0.0), np.take_along_axis(self.scores, kept, 1)),
            sizes,
        )

    def take(self, rows: Sequence[int]) -> DraftTrees:
        """The trees at the indices `rows`."""
        taken = np.array(rows, dtype=np.intp)
        return DraftTrees(
            self.token_ids[taken],
            self.parents[taken],
            self.sources[taken],
            self.scores[taken],
            self.sizes[taken],
            self.ragged,
        )

    def lay_out(self) -> TreeLayout:
        """Masks and links of the trees for SGLang's kernels."""
        return TreeLayout(*_native.lay_out(self.parents, self.sizes))

    @property
    def steps(self) -> NDArray[np.bool_]:
        """Which nodes [bs, D] are step drafts of the sidecar: a new array, roots included."""
        of_steps = (self.sources == Source.STEP) | (self.sources == Source.HEAD)
        return of_steps & (self.scores > 0)

    def count_by_source(self) -> dict[Source, int]:
        """Number of draft tokens of each source, without roots and padding."""
        return dict(zip(Source, _native.count_by_source(self.sources, self.sizes), strict=True))

    def count_by_position(
        self,
        accepted: Sequence[Sequence[int]],
        judged: NDArray[np.int64],
        right: NDArray[np.int64],
    ) -> None:
        """Add to `judged` and `right`, given the `accepted` nodes of each tree in order.

        Both counts are [len(Source), positions]; the last position also counts all later ones. A
        node is judged at position p if its parent is the root (p = 1) or the accepted node of
        position p - 1, because the target chose a token there. The node is right if it has that
        token. Descendants of a rejected node are not judged.
        """
        _native.count_by_position(self.parents, self.sources, self.sizes, accepted, judged, right)
