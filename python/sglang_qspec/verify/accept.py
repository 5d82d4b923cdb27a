"""Which nodes of a draft tree does the target accept?

Sample-and-match: the target has drawn one token at every node of the tree (see
`sglang_qspec.verify.sample`); the walk starts at the root and follows a child for as long as
the child's draft token equals the token drawn at its parent. The token drawn at the last
accepted node is the bonus token. Each node's draw is independent of the drafts, so the text
that comes out has exactly the target's distribution, whatever was drafted, and it is the greedy
text when every draw is the argmax. The tree form of "speculative sampling" with a deterministic
drafter: Leviathan et al. 2023 (arXiv:2211.17192); SpecInfer (arXiv:2305.09781) for trees.
"""

from __future__ import annotations

from collections.abc import Sequence

DraftKV = Sequence[Sequence[int]]
"""[bs][D]: of each request, one number a node."""


def accept(
    draft_tokens: DraftKV,
    first_children: DraftKV,
    next_siblings: DraftKV,
    targets: DraftKV,
    max_len: int,
) -> list[list[int]]:
    """Of each request the nodes on the accepted path, the root (node 0) first.

    A node's children are the first one and that one's next siblings, up to -1. `targets` are what
    the target has drawn behind each node. Of siblings with the same token the first counts. At most
    `max_len - 1` draft tokens are accepted.
    """
    return [
        _walk(*rows, max_len)
        for rows in zip(draft_tokens, first_children, next_siblings, targets, strict=True)
    ]


def _walk(
    tokens: Sequence[int],
    children: Sequence[int],
    siblings: Sequence[int],
    targets: Sequence[int],
    max_len: int,
) -> list[int]:
    path: list[int] = []
    node = 0
    while node >= 0 and len(path) < max_len:
        path.append(node)
        drawn, node = targets[node], children[node]
        while node >= 0 and tokens[node] != drawn:
            node = siblings[node]
    return path
