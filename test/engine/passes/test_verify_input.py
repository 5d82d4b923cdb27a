"""Tensors of draft trees, compared with the links and masks that SGLang derives for NGRAM."""

import random

import numpy as np
import pytest
import torch

from sglang_qspec.engine.passes.verify_input import verify_input_of
from sglang_qspec.trie import DraftTree, DraftTrees, Source


def random_tree(rng: random.Random, size: int) -> DraftTree:
    """A tree of distinct tokens, so no two siblings are equal."""
    return DraftTree(
        tuple(range(100, 100 + size)),
        (0, *(rng.randrange(node) for node in range(1, size))),
        (Source.QUEUE,) * size,
        tuple(1.0 / (1 + node) for node in range(size)),
    )


@pytest.mark.parametrize("width", [2, 5, 8, 16])
def test_links_of_full_trees_are_those_that_sglang_derives_from_the_mask(width: int) -> None:
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    rng = random.Random(width)
    trees = DraftTrees.of([random_tree(rng, width) for _ in range(20)], width)
    layout = trees.lay_out()
    next_token, next_sibling = _derive_tree_links(layout.mask, len(trees), width)
    np.testing.assert_array_equal(layout.next_token, next_token.numpy())
    np.testing.assert_array_equal(layout.next_sibling, next_sibling.numpy())


def test_positions_are_the_committed_length_plus_the_depth() -> None:
    tree = DraftTree((1, 2, 3, 4), (0, 0, 1, 0), (Source.QUEUE,) * 4, (1.0, 0.9, 0.5, 0.1))
    trees = DraftTrees.of([tree, tree], 4)
    verify_input = verify_input_of(trees, torch.tensor([10, 20]), "cpu", full_mask=False)
    assert verify_input.positions.tolist() == [10, 11, 12, 11, 20, 21, 22, 21]
    assert verify_input.custom_mask.view(2, 4, 4)[0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 0, 0, 1],
    ]


def test_a_full_mask_lets_every_node_see_the_whole_prefix() -> None:
    tree = random_tree(random.Random(1), 3)
    trees = DraftTrees.of([tree, tree], 3)
    layout = trees.lay_out()
    mask = verify_input_of(trees, torch.tensor([2, 4]), "cpu", full_mask=True).custom_mask
    first, second = mask[: 3 * 5].view(3, 5), mask[3 * 5 :].view(3, 7)
    assert first[:, :2].all()
    assert second[:, :4].all()
    assert torch.equal(first[:, 2:], torch.from_numpy(layout.mask[0]))
    assert torch.equal(second[:, 4:], torch.from_numpy(layout.mask[1]))
