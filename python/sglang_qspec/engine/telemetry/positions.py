"""How often drafts are right, by their source and their position behind what is committed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_qspec.trie import DraftTrees, Source

POSITIONS = 16
"""Number of positions; the last one also counts all later positions."""


class Positions:
    """Counts the draft tokens that the target judged, and those of them that it agreed with.

    Position 1 is the token behind the last committed one. A draft token is judged where the target
    agreed with all before it: then, and only then, the pass tells what the target chooses in its
    place. So right over judged is the chance of a token of that source at that position, given
    those before it. Several siblings are judged at once, and one of them at most is right. Tokens
    behind the end of an answer count like others, as the target did judge them.
    """

    def __init__(self) -> None:
        self.judged = np.zeros((len(Source), POSITIONS), dtype=np.int64)
        self.right = np.zeros((len(Source), POSITIONS), dtype=np.int64)

    def record(self, trees: DraftTrees, accepted: Sequence[Sequence[int]]) -> None:
        """A pass over `trees` is done; `accepted` are the nodes confirmed of each, in order."""
        trees.count_by_position(accepted, self.judged, self.right)

    def describe(self) -> dict[str, dict[str, list[int]]]:
        """For /server_info and /metrics: by source, a number for each position."""
        return {
            source.name.lower(): {
                "judged": self.judged[source].tolist(),
                "right": self.right[source].tolist(),
            }
            for source in Source
        }
