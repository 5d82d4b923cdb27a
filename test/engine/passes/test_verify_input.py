"""Tensors of draft trees, compared with the links and masks that SGLang derives for NGRAM."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec.engine.passes.launch.verify_input import verify_input_of
from sglang_qspec.trie import DraftTree, DraftTrees, Source
from test.trees import random_tree


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


def test_a_ragged_pass_runs_the_nodes_of_each_tree_without_padding() -> None:
    tree = DraftTree((1, 2, 3, 4), (0, 0, 1, 0), (Source.QUEUE,) * 4, (1.0, 0.9, 0.5, 0.1))
    trees = DraftTrees.of([tree, tree, tree], 4).cut(np.array([2, 1, 4]))
    found = verify_input_of(trees, torch.tensor([10, 20, 30]), "cpu", full_mask=True)
    assert found.rows == 7
    assert found.input_ids.tolist() == [1, 2, 1, 1, 2, 3, 4]
    assert found.positions.tolist() == [10, 11, 20, 30, 31, 32, 31]
    assert found.owners.tolist() == [0, 0, 1, 2, 2, 2, 2]
    assert found.offsets.tolist() == [0, 1, 0, 0, 1, 2, 3]
    # Padding has the row, and the mask, of the last node.
    assert found.retrieve_index.tolist() == [[0, 1, 1, 1], [2, 2, 2, 2], [3, 4, 5, 6]]
    assert found.tree_mask.int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]],
        [[1, 0, 0, 0]] * 4,
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]],
    ]
    assert found.retrieve_next_token.tolist() == [[1, -1, -1, -1], [-1] * 4, [1, 2, -1, -1]]
    assert found.retrieve_next_sibling.tolist() == [[-1] * 4, [-1] * 4, [-1, 3, -1, -1]]
    layout = found.ragged_verify_layout
    assert layout is not None
    assert (layout.verify_lens_cpu, layout.total_verify_tokens) == ([2, 1, 4], 7)
    assert layout.graph_num_tokens == 7
    assert layout.verify_lens.tolist() == [2, 1, 4]
    assert layout.qo_indptr_device.tolist() == [0, 2, 3, 7]
    assert layout.extend_start_loc.tolist() == [0, 2, 3]
    assert {layout.verify_lens.dtype, layout.qo_indptr_device.dtype} == {torch.int32}


@pytest.mark.parametrize("ragged", [False, True])
def test_the_kv_of_accepted_nodes_moves_behind_the_committed_tokens(ragged: bool) -> None:
    tree = random_tree(random.Random(2), 4)
    trees = DraftTrees.of([tree] * 3, 4)
    if ragged:
        trees = trees.cut(np.array([3, 1, 4]))
    found = verify_input_of(trees, torch.tensor([2, 5, 3]), "cpu", full_mask=False)
    slots = torch.arange(100, 130).view(3, 10)
    pool = SimpleNamespace(req_to_token=slots)
    batch: Any = SimpleNamespace(
        req_to_token_pool=pool,
        req_pool_indices=torch.tensor([2, 0, 1]),
        seq_lens=torch.tensor([2, 5, 3]),
    )
    batch.out_cache_loc = found.slots(batch)
    roots = found.retrieve_index[:, 0].tolist()
    assert batch.out_cache_loc[roots].tolist() == [122, 105, 113]
    accepted = [[roots[0], roots[0] + 2, -1, -1], [roots[1], -1, -1, -1], [roots[2], -1, -1, -1]]
    accepted[2][1:3] = [roots[2] + 1, roots[2] + 3]
    moved: dict[int, int] = {}

    def move(targets: torch.Tensor, sources: torch.Tensor) -> None:
        moved.update(zip(targets.tolist(), sources.tolist(), strict=True))

    cache = SimpleNamespace(move_kv_cache=move)
    found.move_accepted(batch, torch.tensor(accepted), SimpleNamespace(get_kvcache=lambda: cache))
    assert moved == {0: 0, 122: 122, 123: 124, 105: 105, 113: 113, 114: 114, 115: 116}


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
