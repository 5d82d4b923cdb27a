"""What rank 0 proposes for one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_qspec.trie import DraftTrees


@dataclass(frozen=True)
class Proposal:
    """The trees that one pass verifies."""

    trees: DraftTrees
    """The trees that the pass runs, after all cuts."""
    candidates: DraftTrees | None = None
    """The larger trees from which `trees` are cut; None for a pass that may not use drafts."""
    waited: float = 0.0
    """Wait for step drafts, in seconds."""
    unread: bool = False
    """Whether the tokens of the pass are not committed before a later pass proposes drafts."""

    def take(self, rows: Sequence[int]) -> Proposal:
        """The proposal for the requests at the indices `rows`."""
        candidates = None if self.candidates is None else self.candidates.take(rows)
        return replace(self, trees=self.trees.take(rows), candidates=candidates)
