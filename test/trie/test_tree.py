"""The flat tree and its padded batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.trie import DraftTree, Source, pack


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(1, 7))
    parents = [0, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    return DraftTree(
        token_ids=tuple(range(50, 50 + size)),
        parents=tuple(parents),
        sources=(Source.OUTPUT, *[Source.QUEUE] * (size - 1)),
        scores=tuple(0.5**node for node in range(size)),
    )


def ancestors(parents: list[int], node: int) -> set[int]:
    found = {node}
    while node:
        node = parents[node]
        found.add(node)
    return found


@given(st.lists(trees(), max_size=4), st.integers(1, 9))
def test_the_mask_holds_each_node_and_its_ancestors(batch: list[DraftTree], width: int) -> None:
    packed = pack(batch, width)
    assert packed.token_ids.shape == (len(batch) * width,)
    assert packed.token_ids.dtype == packed.parents.dtype == packed.depths.dtype == np.int64
    assert packed.mask.shape == (len(batch), width, width)
    assert packed.mask.dtype == np.bool_
    for row, tree in enumerate(batch):
        parents = packed.parents[row].tolist()
        size = min(len(tree), width)
        assert tuple(parents[:size]) == tree.parents[:size]
        assert tuple(packed.token_ids.reshape(-1, width)[row, :size]) == tree.token_ids[:size]
        for node in range(width):
            assert set(np.flatnonzero(packed.mask[row, node])) == ancestors(parents, node)
            assert packed.depths[row, node] == len(ancestors(parents, node)) - 1


@given(trees(), st.integers(1, 12))
def test_padding_has_no_sibling_so_no_probability_counts_twice(tree: DraftTree, width: int) -> None:
    parents = pack([tree], width).parents[0].tolist()
    for pad in range(len(tree), width):
        assert parents[1:].count(parents[pad]) == 1


@given(trees(), st.integers(1, 9))
def test_the_best_part_of_a_tree_is_a_tree(tree: DraftTree, size: int) -> None:
    best = tree.best(size)
    best.check_integrity()
    assert len(best) == min(size, len(tree))
    assert best.token_ids == tree.token_ids[: len(best)]


def test_a_width_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 0"):
        pack([], 0)


@pytest.mark.parametrize(
    ("token_ids", "parents", "scores"),
    [
        ((1, 2), (0, 1), (1.0, 0.5)),
        ((1, 2), (1, 0), (1.0, 0.5)),
        ((1, 2, 2), (0, 0, 0), (1.0, 0.5, 0.4)),
        ((1, 2, 3), (0, 0, 0), (1.0, 0.4, 0.5)),
        ((1, 2), (0,), (1.0, 0.5)),
    ],
)
def test_a_malformed_tree_is_noticed(
    token_ids: tuple[int, ...], parents: tuple[int, ...], scores: tuple[float, ...]
) -> None:
    tree = DraftTree(token_ids, parents, (Source.QUEUE,) * len(token_ids), scores)
    with pytest.raises(RuntimeError):
        tree.check_integrity()
