"""Counts right draft tokens by source and by position after the committed output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_qspec.trie import DraftTrees, Source

POSITIONS = 16
"""Number of positions; the last one also counts all later positions."""


class Positions:
    """Counts the draft tokens that the target judged, and the right tokens among them.

    Position 1 follows the last committed token. The target judges a draft token if all tokens
    before it on its path are right, because only then the pass gives the target's choice at the
    token's position. So right / judged estimates the probability that a token is right after a
    right prefix. The target judges all siblings, and at most one sibling is right. Tokens after the
    end of an answer count too.
    """

    def __init__(self) -> None:
        self.judged = np.zeros((len(Source), POSITIONS), dtype=np.int64)
        """Draft tokens that the target judged: [source, position - 1]."""
        self.right = np.zeros((len(Source), POSITIONS), dtype=np.int64)
        """Judged draft tokens that equal the target's choice: [source, position - 1]."""

    def record(self, trees: DraftTrees, accepted: Sequence[Sequence[int]]) -> None:
        """Count a pass over `trees`; `accepted` has the accepted nodes of each tree, in order."""
        trees.count_by_position(accepted, self.judged, self.right)

    def describe(self) -> dict[str, dict[str, list[int]]]:
        """Counts for /server_info and /metrics: by source, one number for each position."""
        return {
            source.name.lower(): {
                "judged": self.judged[source].tolist(),
                "right": self.right[source].tolist(),
            }
            for source in Source
        }
