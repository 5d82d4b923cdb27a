"""The accepted path is the longest one that equals the target's draws."""

from __future__ import annotations

import torch

from sglang_qspec.cpu.tree_links import links_from_parents
from sglang_qspec.verify.accept import accept


def paths(
    draft: list[list[int]], parents: list[list[int]], targets: list[list[int]], max_len: int
) -> list[list[int]]:
    children, siblings = links_from_parents(torch.tensor(parents))
    return accept(draft, children.tolist(), siblings.tolist(), targets, max_len)


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    assert paths([[5, 7, 8, 9]], [[0, 0, 1, 2]], [[7, 8, 1, 2]], 4) == [[0, 1, 2]]


def test_without_a_match_only_the_bonus_token_is_accepted() -> None:
    assert paths([[5, 7]], [[0, 0]], [[1, 7]], 2) == [[0]]


def test_the_first_of_equal_siblings_is_accepted() -> None:
    assert paths([[5, 7, 7, 8, 9]], [[0, 0, 0, 1, 2]], [[7, 9, 9, 0, 0]], 5) == [[0, 1]]


def test_a_node_without_a_parent_is_never_accepted() -> None:
    assert paths([[5, 7, 7]], [[0, 1, 1]], [[7, 7, 7]], 3) == [[0]]


def test_the_accepted_path_is_at_most_as_long_as_the_width() -> None:
    assert paths([[4] * 6], [[0, 0, 1, 2, 3, 4]], [[4] * 6], 3) == [[0, 1, 2]]


def longest(draft: list[int], parents: list[int], targets: list[int], max_len: int) -> list[int]:
    """The first of the longest paths that match the targets, by a search from each node upwards."""
    best: list[int] = []
    for leaf in range(len(draft)):
        path, right = [leaf], True
        while path[0]:
            parent = parents[path[0]]
            twins = [n for n in range(1, path[0]) if parents[n] == parent]
            earlier = any(draft[n] == draft[path[0]] for n in twins)
            right &= draft[path[0]] == targets[parent] and not earlier
            path.insert(0, parent)
        if right and len(best) < len(path) <= max_len:
            best = path
    return best


def test_the_longest_matching_path_of_random_trees_is_accepted() -> None:
    random = torch.Generator().manual_seed(4)
    bs, width = 200, 12
    parents = torch.zeros(bs, width, dtype=torch.int64)
    for node in range(1, width):
        parents[:, node] = torch.randint(0, node, (bs,), generator=random)
    draft = torch.randint(0, 3, (bs, width), generator=random).tolist()
    targets = torch.randint(0, 3, (bs, width), generator=random).tolist()
    trees = draft, parents.tolist(), targets
    found = paths(*trees, 4)
    assert found == [longest(*rows, 4) for rows in zip(*trees, strict=True)]
    assert {len(path) for path in found} == {1, 2, 3, 4}
