"""Decides which nodes of a draft tree the target accepts (sample and match).

The target has drawn one token at every node (`sglang_qspec.verify.sample`). The walk starts at the
root and moves to a child as long as the child's draft token equals the token drawn at its parent.
The token drawn at the last accepted node is the bonus token. The draws do not depend on the drafts,
so the text has exactly the target's distribution, and it is the greedy text if every draw is the
argmax. This is speculative sampling with a deterministic drafter (Leviathan et al. 2023,
arXiv:2211.17192), on trees as in SpecInfer (arXiv:2305.09781).
"""

from __future__ import annotations

from collections.abc import Sequence

NodeTable = Sequence[Sequence[int]]
"""[bs][D]: one number for each node of each request's tree."""


def accept(
    draft_tokens: NodeTable,
    first_children: NodeTable,
    next_siblings: NodeTable,
    targets: NodeTable,
    max_len: int,
) -> list[list[int]]:
    """Return the nodes on the accepted path of each request, the root (node 0) first.

    `first_children` and `next_siblings` link the nodes; -1 means none. `targets` are the tokens
    that the target has drawn after each node. Among siblings with the same token the first one is
    accepted. At most `max_len - 1` draft tokens are accepted.
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
