"""A correction factor for one request's draft scores, learnt from every pass.

A score is an acceptance estimate over all requests. One request's drafts may do much worse, for
example when its client guesses wrong. Its factor then falls until none of its draft tokens is worth
verifying. The target's next token shows whether a tree's first tokens are right, even in a plain
pass. So no probing is needed, and a request without credit can regain it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.trie import DraftTrees

WEIGHT = 4.0
"""Weight of the prior in tokens; with no observations the factor is 1."""
MEMORY = 32.0
"""Value of `claimed` above which both counts are halved, so that recent passes count more."""
MOST = 1.2
"""Upper limit of the factor."""


@dataclass
class Credit:
    """How often one request's drafts were right, compared with their scores."""

    claimed: float = 0.0
    """Sum of the scores of the nodes that hang from the roots of the request's trees."""
    right: float = 0.0
    """Number of passes in which one of these nodes had the target's token."""

    @property
    def factor(self) -> float:
        """Multiplier for the scores of the request's drafts, above 0 and at most `MOST`."""
        return min((WEIGHT + self.right) / (WEIGHT + self.claimed), MOST)

    def observe(self, claimed: float, right: bool) -> None:
        """Record a pass: the sum of the first tokens' scores, and whether one of them was right."""
        self.claimed += claimed
        self.right += right
        if self.claimed > MEMORY:
            self.claimed /= 2
            self.right /= 2


@dataclass(frozen=True)
class FirstTokens:
    """The nodes that hang from the roots of a batch's trees, and which of them were right."""

    proposed: NDArray[np.bool_]
    """[bs, D]: whether the node hangs from the root."""
    right: NDArray[np.bool_]
    """[bs, D]: whether the node also has the target's token; at most one node of a tree does."""

    @classmethod
    def of(cls, trees: DraftTrees, next_ids: NDArray[np.int32]) -> FirstTokens:
        """Compare the trees with `next_ids` [bs], the tokens that the target committed next."""
        proposed = (trees.parents == 0) & (trees.scores > 0)
        proposed[:, :1] = False  # the root is its own parent
        return cls(proposed, proposed & (trees.token_ids == next_ids[:, None]))
