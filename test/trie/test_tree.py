"""The flat tree and a padded batch of trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.trie import DraftTree, DraftTrees, Source


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


def cut(tree: DraftTree, size: int) -> DraftTree:
    return DraftTree(
        tree.token_ids[:size], tree.parents[:size], tree.sources[:size], tree.scores[:size]
    )


def ancestors(parents: list[int], node: int) -> set[int]:
    found = {node}
    while node:
        node = parents[node]
        found.add(node)
    return found


@given(st.lists(trees(), max_size=4), st.integers(1, 9))
def test_the_mask_holds_each_node_and_its_ancestors(batch: list[DraftTree], width: int) -> None:
    packed = DraftTrees.of(batch, width)
    layout = packed.lay_out()
    assert packed.token_ids.shape == packed.parents.shape == (len(batch), width)
    assert layout.depths.dtype == layout.next_token.dtype == layout.next_sibling.dtype == np.int64
    assert layout.mask.shape == (len(batch), width, width)
    assert layout.mask.dtype == np.bool_
    for row, tree in enumerate(batch):
        parents = packed.parents[row].tolist()
        assert packed[row] == cut(tree, width)
        for node in range(width):
            assert set(np.flatnonzero(layout.mask[row, node])) == ancestors(parents, node)
            assert layout.depths[row, node] == len(ancestors(parents, node)) - 1


@given(st.lists(trees(), max_size=4), st.integers(1, 9))
def test_the_links_visit_each_child_in_order_and_no_padding(
    batch: list[DraftTree], width: int
) -> None:
    layout = DraftTrees.of(batch, width).lay_out()
    for row, tree in enumerate(batch):
        for node in range(width):
            children, child = [], layout.next_token[row, node]
            while child >= 0:
                children.append(child)
                child = layout.next_sibling[row, child]
            assert children == [
                n for n in range(1, len(cut(tree, width))) if tree.parents[n] == node
            ]


@given(trees(), st.integers(1, 12))
def test_padding_has_no_sibling_so_no_probability_counts_twice(tree: DraftTree, width: int) -> None:
    parents = DraftTrees.of([tree], width).parents[0].tolist()
    for pad in range(len(tree), width):
        assert parents[1:].count(parents[pad]) == 1


@given(st.lists(trees(), max_size=4), st.integers(1, 9))
def test_narrowing_a_batch_keeps_valid_trees(batch: list[DraftTree], width: int) -> None:
    best = DraftTrees.of(batch, 9).best(width)
    assert best.width == width
    assert len(best) == len(batch)
    for row, tree in enumerate(batch):
        part = best[row]
        part.check_integrity()
        assert part == cut(tree, width)


@given(st.lists(trees(), min_size=1, max_size=4), st.data())
def test_a_ragged_batch_has_the_best_nodes_of_each_tree(
    batch: list[DraftTree], data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(batch), max_size=len(batch)))
    whole = DraftTrees.of(batch, 9)
    ragged = whole.cut(np.array(lengths))
    parts = [cut(tree, length) for tree, length in zip(batch, lengths, strict=True)]
    assert [ragged[row] for row in range(len(batch))] == parts
    sizes = [len(part) for part in parts]
    assert ragged.width == max(sizes)
    assert ragged.rows == sum(sizes)
    assert ragged.starts.tolist() == [sum(sizes[:row]) for row in range(len(sizes))]
    assert (ragged.scores[np.arange(ragged.width) >= ragged.sizes[:, None]] == 0).all()
    # The padding is that of a batch of one width.
    padded = DraftTrees.of(parts, ragged.width)
    for name in ("token_ids", "parents", "sources", "scores"):
        assert getattr(ragged, name)[:, 1:].tolist() == getattr(padded, name)[:, 1:].tolist()
    assert (whole.rows, whole.starts.tolist()) == (
        9 * len(batch),
        [9 * n for n in range(len(batch))],
    )


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, 9))
def test_a_chain_is_the_path_with_the_most_expected_tokens(
    batch: list[DraftTree], width: int
) -> None:
    whole = DraftTrees.of(batch, width)
    chains = whole.chains()
    for row in range(len(batch)):
        tree, chain = whole[row], chains[row]
        chain.check_integrity()
        assert chain.parents == (0, *range(len(chain) - 1))
        paths = [[0]]
        for node in range(1, len(tree)):
            paths.append([*next(p for p in paths if p[-1] == tree.parents[node]), node])
        totals = [sum(tree.scores[node] for node in path) for path in paths]
        best = max(totals)
        assert sum(chain.scores) == pytest.approx(best, rel=1e-5)
        assert list(chain.token_ids) in [[tree.token_ids[n] for n in path] for path in paths]


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, 12), st.data())
def test_some_rows_of_a_batch_are_a_batch_of_their_trees(
    batch: list[DraftTree], width: int, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.sampled_from(range(len(batch))), unique=True))
    taken = DraftTrees.of(batch, width).take(rows)
    assert [taken[row] for row in range(len(taken))] == [cut(batch[row], width) for row in rows]
    assert taken.width == width


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 12))
def test_trees_are_chains_if_no_node_has_two_children(batch: list[DraftTree], width: int) -> None:
    padded = DraftTrees.of(batch, width)
    parents = [tree.parents[1:width] for tree in batch]
    assert padded.are_chains == all(len(set(row)) == len(row) for row in parents)


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 0"):
        DraftTrees.of([], 0)


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
def test_check_integrity_rejects_a_malformed_tree(
    token_ids: tuple[int, ...], parents: tuple[int, ...], scores: tuple[float, ...]
) -> None:
    tree = DraftTree(token_ids, parents, (Source.QUEUE,) * len(token_ids), scores)
    with pytest.raises(RuntimeError):
        tree.check_integrity()
