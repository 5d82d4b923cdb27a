"""Draft chains, and the times of passes over them."""

from sglang_qspec.policy import PassCost, PassTimes
from sglang_qspec.trie import DraftTree, Source


def chain(*scores: float) -> DraftTree:
    """A chain of draft tokens with these probabilities of acceptance."""
    size = len(scores) + 1
    return DraftTree(
        tuple(range(size)), (0, *range(size - 1)), (Source.QUEUE,) * size, (1.0, *scores)
    )


def linear(row: float) -> PassTimes:
    """Times of passes that cost 1, and `row` more for each row."""
    return PassTimes(PassCost(cheap_rows=0, row=row))
