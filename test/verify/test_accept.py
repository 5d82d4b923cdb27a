"""The accepted path is the one that a walk from the root finds."""

import torch

from sglang_qspec.verify.accept import accept


def _walk(draft: list[int], parents: list[int], targets: list[int], max_len: int) -> list[int]:
    """Node by node: the nodes on the accepted path, root first."""
    path = [0]
    while len(path) < max_len:
        here = path[-1]
        children = [i for i, p in enumerate(parents) if p == here and i != here]
        step = next((i for i in children if draft[i] == targets[here]), None)
        if step is None:
            break
        path.append(step)
    return path


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    draft = torch.tensor([[5, 7, 8, 9]])
    parents = torch.tensor([[0, 0, 1, 2]])
    result = accept(draft, parents, torch.tensor([[7, 8, 1, 2]]), 4)
    assert result.on_path.tolist() == [[True, True, True, False]]
    assert result.accept_lens.tolist() == [3]


def test_nothing_matching_leaves_the_bonus_token_alone() -> None:
    result = accept(torch.tensor([[5, 7]]), torch.tensor([[0, 0]]), torch.tensor([[1, 7]]), 2)
    assert result.accept_lens.tolist() == [1]


def test_of_equal_siblings_the_first_counts() -> None:
    draft = torch.tensor([[5, 7, 7, 8, 9]])
    parents = torch.tensor([[0, 0, 0, 1, 2]])
    result = accept(draft, parents, torch.tensor([[7, 9, 9, 0, 0]]), 5)
    assert result.on_path.tolist() == [[True, True, False, False, False]]


def test_a_node_without_a_parent_is_never_accepted() -> None:
    draft = torch.tensor([[5, 7, 7]])
    result = accept(draft, torch.tensor([[0, 1, 1]]), torch.tensor([[7, 7, 7]]), 3)
    assert result.accept_lens.tolist() == [1]


def test_no_more_is_accepted_than_the_width_allows() -> None:
    draft = torch.full((1, 6), 4)
    parents = torch.tensor([[0, 0, 1, 2, 3, 4]])
    result = accept(draft, parents, torch.full((1, 6), 4), 3)
    assert result.accept_lens.tolist() == [3]


def test_random_trees_are_walked_as_node_by_node() -> None:
    random = torch.Generator().manual_seed(4)
    bs, width = 200, 12
    parents = torch.zeros(bs, width, dtype=torch.int64)
    for node in range(1, width):
        parents[:, node] = torch.randint(0, node, (bs,), generator=random)
    draft = torch.randint(0, 3, (bs, width), generator=random)
    targets = torch.randint(0, 3, (bs, width), generator=random)
    result = accept(draft, parents, targets, 8)
    for row in range(bs):
        path = _walk(draft[row].tolist(), parents[row].tolist(), targets[row].tolist(), 8)
        assert result.on_path[row].nonzero().flatten().tolist() == sorted(path)
        assert [int(result.depths[row, node]) for node in path] == list(range(len(path)))
        assert int(result.accept_lens[row]) == len(path)
