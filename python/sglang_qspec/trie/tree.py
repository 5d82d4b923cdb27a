"""The draft tree of one request for one pass."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_qspec.draft_source import Source


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A flat tree of draft tokens: node i has token `token_ids[i]` and parent `parents[i]` < i.

    Node 0 is the root, the last committed token. It is its own parent, its score is 1.0 and its
    source has no meaning. `scores` are estimated acceptance probabilities in falling order, so the
    first k nodes are the best tree of k nodes. Siblings have different tokens, because tree
    sampling would count the probability of a repeated token twice.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[Source, ...]
    scores: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the tree violates the properties above."""
        sizes = {len(self.token_ids), len(self.parents), len(self.sources), len(self.scores)}
        if len(sizes) != 1 or not self.token_ids:
            raise RuntimeError(f"a draft tree's fields have lengths {sorted(sizes)}")
        if self.parents[0] != 0:
            raise RuntimeError(f"the root has the parent {self.parents[0]}, but must be its own")
        children: set[tuple[int, int]] = set()
        for node in range(1, len(self)):
            parent = self.parents[node]
            if not 0 <= parent < node:
                raise RuntimeError(f"node {node} has the parent {parent}, which is not before it")
            if self.scores[node] > self.scores[node - 1]:
                raise RuntimeError(f"node {node} is likelier than the node before it")
            if (parent, self.token_ids[node]) in children:
                raise RuntimeError(f"node {parent} has token {self.token_ids[node]} twice")
            children.add((parent, self.token_ids[node]))
