"""Draft trees of random shapes."""

import random

from sglang_qspec.trie import DraftTree, Source


def random_tree(rng: random.Random, size: int) -> DraftTree:
    """A tree of distinct tokens, so no two siblings are equal."""
    return DraftTree(
        tuple(range(100, 100 + size)),
        (0, *(rng.randrange(node) for node in range(1, size))),
        (Source.QUEUE,) * size,
        tuple(1.0 / (1 + node) for node in range(size)),
    )
