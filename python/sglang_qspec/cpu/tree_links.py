"""Conversions between the forms in which SGLang represents a draft tree.

SGLang's verify kernels read a tree as a mask (which nodes are ancestors) or as links (first child
and next sibling, -1 for none). The conversions use a third form, `parents`: the index of each
node's parent, or of the node itself if it has none. All tensors are int64 [bs, D] unless stated
otherwise. A parent's index is smaller than its child's.
"""

import torch
from torch import Tensor


def parents_from_mask(mask: Tensor) -> Tensor:
    """Return the nearest ancestor of each node in `mask` bool [bs, D, D].

    `mask[b, i, j]` says that j is i or an ancestor of i.
    """
    nodes = torch.arange(mask.shape[1], device=mask.device)
    nearest = torch.where(mask.tril(-1), nodes, -1).amax(2)
    return torch.where(nearest < 0, nodes, nearest)


def links_from_parents(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return first child and next sibling of each node, -1 for none; siblings have rising ids."""
    width = parents.shape[1]
    nodes = torch.arange(width, device=parents.device)
    later = nodes > nodes.unsqueeze(1)
    rooted = parents != nodes
    is_child = (parents.unsqueeze(1) == nodes.unsqueeze(1)) & later
    is_sibling = (parents.unsqueeze(1) == parents.unsqueeze(2)) & later & rooted.unsqueeze(2)
    return _first_true(is_child & rooted.unsqueeze(1)), _first_true(is_sibling)


def _first_true(flags: Tensor) -> Tensor:
    """Index of the first true entry along the last dimension, -1 where there is none."""
    found, index = flags.to(torch.uint8).max(2)
    return torch.where(found > 0, index, -1)


def mask_from_parents(parents: Tensor) -> Tensor:
    """Return the mask bool [bs, D, D]: entry [b, i, j] says that j is i or an ancestor of i."""
    width = parents.shape[1]
    nodes = torch.arange(width, device=parents.device)
    mask = (nodes == nodes.unsqueeze(1)).expand(parents.shape[0], width, width)
    ancestors = parents
    reach = 1
    while reach < width:
        mask = mask | mask.gather(1, ancestors.unsqueeze(2).expand_as(mask))
        ancestors = ancestors.gather(1, ancestors)
        reach *= 2
    return mask
