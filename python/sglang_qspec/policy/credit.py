"""Whether a request's drafts are as good as their scores say, learnt from every pass.

A score is what drafts of its kind have been worth to all requests. One request's drafts may be
worth much less, as when its client guesses wrong or its text is like no other: then its scores are
marked down, and after some passes nothing of it is worth a row. A tree's first tokens can be judged
by what the target says next, verified or not, so this costs no probes and a request that has lost
all credit can win it back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.trie import DraftTrees

WEIGHT = 4.0
"""Tokens that are taken to have been as right as their scores before any was seen."""
MEMORY = 32.0
"""Claimed tokens, of which half are forgotten when there are so many."""
MOST = 1.2
"""A request is never believed more than its scores by a larger factor."""


@dataclass
class Credit:
    """Of one request."""

    claimed: float = 0.0
    """Sum of the scores of its trees' first tokens."""
    right: float = 0.0
    """How many passes had the target's token among them."""

    @property
    def factor(self) -> float:
        """What the scores of its drafts are to be multiplied with."""
        return min((WEIGHT + self.right) / (WEIGHT + self.claimed), MOST)

    def observe(self, claimed: float, right: bool) -> None:
        """Its tree's first tokens had scores of this sum, and one of them was right, or none."""
        self.claimed += claimed
        self.right += right
        if self.claimed > MEMORY:
            self.claimed /= 2
            self.right /= 2


@dataclass(frozen=True)
class FirstTokens:
    """What a batch's trees proposed behind their roots, and what the target said there."""

    proposed: NDArray[np.bool_]
    """[bs, D]: the nodes that hang from the root."""
    right: NDArray[np.bool_]
    """[bs, D]: that of them, if any, which is the target's token."""

    @classmethod
    def of(cls, trees: DraftTrees, next_ids: NDArray[np.int32]) -> FirstTokens:
        """`next_ids` [bs] are the tokens that the target has committed behind the roots."""
        proposed = (trees.parents == 0) & (trees.scores > 0)
        proposed[:, :1] = False  # the root is its own parent
        return cls(proposed, proposed & (trees.token_ids == next_ids[:, None]))
