"""Ranks read the orders that rank 0 writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.engine.ranks.order import PassOrder, decode, encode, size_of
from sglang_qspec.trie import DraftTrees


def trees_of(requests: int, width: int, *, ragged: bool, seed: int = 0) -> DraftTrees:
    """Random trees; a node's parent comes before it."""
    rng = np.random.default_rng(seed)
    shape = (requests, width)
    parents = (rng.random(shape) * np.maximum(1, np.arange(width))).astype(np.int32)
    return DraftTrees(
        rng.integers(0, 1 << 31, shape, np.int32),
        parents,
        np.zeros(shape, np.uint8),
        np.zeros(shape, np.float32),
        rng.integers(1, width + 1, requests, np.int32),
        ragged,
    )


@given(
    st.none() | st.tuples(st.integers(1, 70), st.integers(1, 64), st.booleans()),
    st.none() | st.lists(st.integers(0, 1 << 20), max_size=40),
    st.booleans(),
    st.booleans(),
)
def test_an_order_survives_its_bytes(
    shape: tuple[int, int, bool] | None, rows: list[int] | None, last: bool, speculates: bool
) -> None:
    trees = None if shape is None else trees_of(shape[0], shape[1], ragged=shape[2])
    data = encode(PassOrder(trees, rows, last, speculates))
    assert size_of(data) == len(data)
    # A frame is longer than most orders.
    found = decode(np.concatenate([data, np.full(64, 255, np.uint8)]))
    assert (found.rows, found.last, found.speculates) == (rows, last, speculates)
    if trees is None:
        assert found.trees is None
        return
    assert found.trees is not None
    assert found.trees.ragged is trees.ragged
    for name in ("token_ids", "parents", "sizes", "sources", "scores"):
        expected, got = getattr(trees, name), getattr(found.trees, name)
        assert got.dtype == expected.dtype, name
        assert (got == expected).all(), name


@pytest.mark.parametrize("ragged", [True, False])
def test_the_other_ranks_lay_out_the_same_pass(ragged: bool) -> None:
    trees = trees_of(3, 8, ragged=ragged, seed=1)
    found = decode(encode(PassOrder(trees))).trees
    assert found is not None
    assert found.rows == trees.rows
    assert (found.starts == trees.starts).all()
    assert found.are_chains is trees.are_chains
    for mine, theirs in zip(trees.lay_out(), found.lay_out(), strict=True):
        assert (mine == theirs).all()
