"""Which nodes of a draft tree does the target accept?

Sample-and-match: the target has drawn one token at every node of the tree (see
`sglang_qspec.verify.sample`); the walk starts at the root and follows a child for as long as
the child's draft token equals the token drawn at its parent. The token drawn at the last
accepted node is the bonus token. Each node's draw is independent of the drafts, so the text
that comes out has exactly the target's distribution, whatever was drafted, and it is the greedy
text when every draw is the argmax. The tree form of "speculative sampling" with a deterministic
drafter: Leviathan et al. 2023 (arXiv:2211.17192); SpecInfer (arXiv:2305.09781) for trees.
"""

from typing import NamedTuple

from torch import Tensor, arange, where


class Acceptance(NamedTuple):
    """The accepted path through each request's tree.

    `on_path` bool [bs, D]: the node is accepted; node 0 (the last committed token) always is.
    `depths` int64 [bs, D]: number of edges between the node and its root.
    `accept_lens` int64 [bs]: accepted draft tokens plus the bonus token, at least 1.
    """

    on_path: Tensor
    depths: Tensor
    accept_lens: Tensor


def accept(draft_tokens: Tensor, parents: Tensor, targets: Tensor, max_len: int) -> Acceptance:
    """Accept the longest path on which every draft token is the one that the target drew.

    `draft_tokens`, `parents`, `targets` are int64 [bs, D]. `targets[b, i]` is the target's token
    after node i. `parents[b, i]` is the node that i continues, and a node that is its own parent
    has none: node 0 is the root, any other such node is not part of the tree. Of siblings with
    the same token the first counts. At most `max_len - 1` draft tokens are accepted.
    """
    nodes = arange(parents.shape[1], device=parents.device)
    matched = (draft_tokens == targets.gather(1, parents)) & (parents != nodes)
    rival = (parents.unsqueeze(2) == parents.unsqueeze(1)) & matched.unsqueeze(1)
    matched &= ~(rival & (nodes < nodes.unsqueeze(1))).any(2)
    matched[:, 0] = True
    on_path, depths = _whole_path(matched, parents)
    on_path &= depths < max_len
    return Acceptance(on_path, depths, on_path.sum(1))


def _whole_path(matched: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """(every node up to the root matches, depth) by pointer doubling: log2(D) rounds."""
    on_path = matched
    ancestors = parents
    depths = where(parents == arange(parents.shape[1], device=parents.device), 0, 1)
    reach = 1
    while reach < parents.shape[1]:
        on_path = on_path & on_path.gather(1, ancestors)
        depths = depths + depths.gather(1, ancestors)
        ancestors = ancestors.gather(1, ancestors)
        reach *= 2
    return on_path, depths
