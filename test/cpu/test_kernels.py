"""The stand-in kernels give the results of SGLang's device kernels, which plain loops compute."""

import pytest
import torch

from sglang_qspec.cpu import kernels

_NONE = -1  # SGLang's link value for "no such node"


def _random(*shape: int, high: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def test_new_slots_are_written_into_each_requests_row() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    start, end = torch.tensor([2, 0, 5]), torch.tensor([4, 0, 8], dtype=torch.int32)
    slots = torch.tensor([11, 12, 13, 14, 15, 99])
    kernels.assign_req_to_token_pool_cpu(torch.tensor([1, 2, 3]), table, start, end, slots, 10)
    expected = torch.zeros(4, 10, dtype=torch.int32)
    expected[1, 2:4] = torch.tensor([11, 12], dtype=torch.int32)
    expected[3, 5:8] = torch.tensor([13, 14, 15], dtype=torch.int32)
    assert torch.equal(table, expected)


def test_slots_of_a_window_are_packed_and_the_rest_stays_unchanged() -> None:
    table = _random(3, 12, high=500).int()
    out = torch.full((8,), 7)
    kernels.assign_extend_cache_locs_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 4]), torch.tensor([4, 6]), out, 12
    )
    assert out.tolist() == [*table[2, 1:4].tolist(), *table[0, 4:6].tolist(), 7, 7, 7]


def test_draft_slots_follow_each_sequence() -> None:
    table = _random(3, 12, high=500).int()
    out = torch.zeros(8, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([1, 2]), table, torch.tensor([3, 6]), out, 12, 2, 2
    )
    assert out.tolist() == [*table[1, 3:7].tolist(), *table[2, 6:10].tolist()]


def test_accepted_slots_move_to_the_front() -> None:
    accepted = torch.tensor([[0, 2, _NONE], [3, _NONE, _NONE]], dtype=torch.int32)
    out = torch.zeros(6, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(accepted, torch.arange(10, 16), out)
    assert out.tolist() == [10, 12, 13, 0, 0, 0]


def test_the_bonus_token_is_the_last_accepted_one() -> None:
    tokens = torch.tensor([5, 6, 0, 8, 0, 0], dtype=torch.int32)
    bonus = torch.zeros(2, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 8]


def test_kv_rows_are_copied_in_every_buffer_even_when_they_overlap() -> None:
    buffers = [torch.arange(24.0).view(6, 4).clone(), torch.arange(12.0).view(6, 2).clone()]
    before = [b.clone() for b in buffers]
    target, source = torch.tensor([1, 2, 0]), torch.tensor([2, 3, 0])
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        torch.tensor([b.stride(0) * 4 for b in buffers]),
        target,
        source,
    )
    for after, old in zip(buffers, before, strict=True):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(after, expected)


def _random_trees(bs: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(parents with root 0, ancestor mask including the node itself) of random trees."""
    random = torch.Generator().manual_seed(width)
    parents = torch.zeros(bs, width, dtype=torch.int64)
    mask = torch.eye(width, dtype=torch.bool).repeat(bs, 1, 1)
    for node in range(1, width):
        parents[:, node] = torch.randint(0, node, (bs,), generator=random)
        for b in range(bs):
            mask[b, node] |= mask[b, int(parents[b, node])]
    return parents, mask


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    width = len(parents)
    child, sibling = [_NONE] * width, [_NONE] * width
    for node in range(1, width):
        later = [k for k in range(node + 1, width) if parents[k] == parents[node]]
        sibling[node] = later[0] if later else _NONE
    for node in range(width):
        children = [k for k in range(node + 1, width) if parents[k] == node]
        child[node] = children[0] if children else _NONE
    return child, sibling


@pytest.mark.parametrize("width", [1, 2, 8, 13])
def test_positions_and_links_come_out_of_a_tree_mask(width: int) -> None:
    bs = 5
    parents, mask = _random_trees(bs, width)
    seq_lens = torch.arange(10, 10 + bs)
    positions = torch.zeros(bs * width, dtype=torch.int64)
    index, child, sibling = (torch.zeros(bs, width, dtype=torch.int64) for _ in range(3))
    kernels.reconstruct_indices_from_tree_mask(
        mask.flatten(), seq_lens, positions, index, child, sibling, bs, width
    )
    depths = mask.sum(2) - 1
    assert torch.equal(positions.view(bs, width), depths + seq_lens.view(-1, 1))
    assert torch.equal(index.flatten(), torch.arange(bs * width))
    for b in range(bs):
        assert (child[b].tolist(), sibling[b].tolist()) == _links(parents[b].tolist())


def _walk(
    draft: list[int], child: list[int], sibling: list[int], targets: list[int], width: int
) -> list[int]:
    path = [0]
    while len(path) < width:
        node = child[path[-1]]
        while node != _NONE and draft[node] != targets[path[-1]]:
            node = sibling[node]
        if node == _NONE:
            break
        path.append(node)
    return path


@pytest.mark.parametrize("bs", [60, 1, 0])
def test_greedy_verification_walks_the_links(bs: int) -> None:
    width, deepest = 9, 6
    parents, _ = _random_trees(bs, width)
    links = [_links(row) for row in parents.tolist()]
    child, sibling = (torch.tensor([link[i] for link in links]) for i in (0, 1))
    draft, targets = _random(bs, width, high=3), _random(bs, width, high=3, seed=1)
    index = torch.arange(bs * width).view(bs, width)
    predicts = torch.zeros(bs * width, dtype=torch.int32)
    accept_index = torch.full((bs, deepest), _NONE, dtype=torch.int32)
    correct = torch.zeros(bs, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=correct,
        candidates=draft,
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=targets,
    )
    expected = torch.zeros_like(predicts)
    for b in range(bs):
        path = _walk(
            draft[b].tolist(), child[b].tolist(), sibling[b].tolist(), targets[b].tolist(), deepest
        )
        places = [b * width + node for node in path]
        assert accept_index[b].tolist() == places + [_NONE] * (deepest - len(path))
        assert int(correct[b]) == len(path) - 1
        expected[places] = targets[b, path].int()
    assert torch.equal(predicts, expected)


@pytest.mark.parametrize("full", [True, False])
def test_an_eagle_tree_is_built_from_the_selected_candidates(full: bool) -> None:
    # With topk 2, candidates 0 and 1 are children of the root; 2 to 5 are children of 0 and 1.
    topk, width, bs = 2, 5, 2
    selected = torch.tensor([[0, 1, 3, 4], [0, 1, 2, 3]])
    parent_list = torch.tensor([[-1, 0, 1], [-1, 0, 1]])
    parents = [[0, 0, 0, 1, 2], [0, 0, 0, 1, 1]]
    seq_lens = torch.tensor([3, 2])
    total = sum((int(n) + width) * width for n in seq_lens) if full else bs * width * width
    mask = torch.ones(total, dtype=torch.bool)
    positions = torch.zeros(bs * width, dtype=torch.int64)
    index, child, sibling = (torch.full((bs, width), _NONE) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        parent_list, selected, seq_lens, mask, positions, index, child, sibling,
        topk, 2, width, 0 if full else 1,
    )  # fmt: skip
    assert positions.view(bs, width).tolist() == [[3, 4, 4, 5, 5], [2, 3, 3, 4, 4]]
    rows = torch.split(mask, [(int(n) * full + width) * width for n in seq_lens])
    for b, flat in enumerate(rows):
        assert (child[b].tolist(), sibling[b].tolist()) == _links(parents[b])
        block = flat.view(width, -1)
        assert bool(block[:, : int(seq_lens[b]) * full].all())
        for node in range(width):
            ancestors = {node, parents[b][node], parents[b][parents[b][node]]}
            assert set(block[node, -width:].nonzero().flatten().tolist()) == ancestors


def test_input_ids_rotate_within_each_request() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    start, lens = torch.tensor([0, 4]), torch.tensor([4, 2])
    kernels.rotate_input_ids_cpu(ids, start, lens, torch.tensor([[8], [9]]))
    assert ids.tolist() == [2, 3, 4, 8, 6, 9]
    kernels.rotate_input_ids_cpu(ids, start, lens, torch.tensor([7, 7]), torch.tensor([1, 4]))
    assert ids.tolist() == [3, 7, 8, 8, 7, 9]
