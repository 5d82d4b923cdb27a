"""Keeps the candidates of step-draft tokens until the target has decided their positions.

The target accepts such a token by rejection sampling (`verify.rejection`). This keeps the target's
distribution for any distribution of the sidecar, for these reasons:

- The sidecar draws a token x from a distribution q, given the text before it, with its own random
  numbers. It does not know the target's random numbers: it has no seed, and its first completions
  are greedy. So x is independent of the random numbers with which the target decides its position.
- Once x has arrived, the target uses x in the pass that decides its position. This holds for every
  kind of pass: over a tree with or without x, at a leaf, without drafts, or the prefill of a
  retracted request. So the value of x does not influence whether its position is decided with x. If
  the target used x only in some passes, the value of x could have this influence.
- The target uses x once. Every pass decides the position after the committed output, and each
  position after a node that it accepts; it discards its other draws. A draft is read from the end
  of the output on, and only while the output is the draft's own text. So a decided position is not
  decided again, and a token that arrives too late is dropped.
- Where drafts overlap, as after a retraction, the earlier draft counts as long as it lasts. The
  later draft has no influence on this choice.

A token without candidates, or after a gap, is a guess like any other. It is independent of the
target's random numbers and does not change what the target draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.messages import Candidates, Drafted
from sglang_qspec.trie import DraftTrees
from sglang_qspec.verify.rejection import Proposals

MAX_TOKENS = 128
"""Maximum number of tokens kept for one request: twice the largest lookahead, since decided tokens
are dropped only when the next pass asks."""


class DrawnToken(NamedTuple):
    """A token of a step draft with its candidates."""

    token_id: int
    candidate_ids: NDArray[np.int64]
    candidate_probs: NDArray[np.float64]

    @classmethod
    def of(cls, token_id: int, candidates: Candidates) -> DrawnToken:
        """A token with its candidates; their probabilities are scaled to a sum of 1."""
        probs = np.array(candidates.probs)
        return cls(token_id, np.array(candidates.token_ids), probs / probs.sum())


class _Draft:
    """The received tokens of one step draft that are not decided yet."""

    def __init__(self, name: tuple[int, int], base_len: int) -> None:
        self.name = name
        """Numbers of the submission and of the draft within the submission."""
        self.received = 0
        self.tokens: deque[DrawnToken] = deque()
        self._place = base_len
        """Output position of the first of `tokens`."""

    def follow(self, output_ids: Sequence[int]) -> bool:
        """Drop the decided tokens. Returns whether the output has the same tokens."""
        if self._place > len(output_ids):  # the output before the draft is missing
            return False
        for token_id in output_ids[self._place : self._place + len(self.tokens)]:
            if self.tokens.popleft().token_id != token_id:
                return False
            self._place += 1
        return True


class StepProposals:
    """The sampled step drafts of all requests, by rid."""

    def __init__(self) -> None:
        self._drafts: dict[str, deque[_Draft]] = {}

    def __len__(self) -> int:
        """Number of requests with tokens."""
        return len(self._drafts)

    def take(self, rid: str, drafted: Drafted) -> None:
        """Add tokens of a step draft. Tokens that do not continue the draft are ignored."""
        drafts = self._drafts.get(rid) or deque()
        kept = sum(len(draft.tokens) for draft in drafts)
        if not drafted.candidates or kept + len(drafted.candidates) > MAX_TOKENS:
            return
        name = (drafted.submission, drafted.completion)
        if not drafts or drafts[-1].name != name:
            if drafted.start:
                return
            drafts.append(_Draft(name, drafted.base_len))
            self._drafts[rid] = drafts
        if drafted.start == drafts[-1].received:
            drafts[-1].received += len(drafted.token_ids)
            drafts[-1].tokens += map(DrawnToken.of, drafted.token_ids, drafted.candidates)

    def end(self, rid: str) -> None:
        """Drop the drafts of a request that has ended."""
        self._drafts.pop(rid, None)

    def ahead(self, rid: str, output_ids: Sequence[int]) -> Sequence[DrawnToken]:
        """The draft tokens for the positions after the committed output, in order."""
        drafts = self._drafts.get(rid)
        while drafts:
            followed = drafts[0].follow(output_ids)
            if followed and (drafts[0].tokens or len(drafts) == 1):  # the last one may get more
                return drafts[0].tokens
            drafts.popleft()
        self._drafts.pop(rid, None)
        return ()

    def proposals(
        self, rids: Sequence[str], outputs: Sequence[Sequence[int]], trees: DraftTrees | None = None
    ) -> Proposals | None:
        """The proposal at every row of a pass over the trees; None if no row has one.

        `outputs` are the committed tokens of each request. Without trees, each request has only its
        root.
        """
        if not self._drafts:
            return None
        starts = range(len(rids)) if trees is None else trees.starts.tolist()
        placed: dict[int, DrawnToken] = {}
        for row, (rid, output_ids) in enumerate(zip(rids, outputs, strict=True)):
            node = 0
            for drawn in self.ahead(rid, output_ids):
                placed[starts[row] + node] = drawn
                child = _child(trees, row, node, drawn.token_id) if trees is not None else None
                if child is None:
                    break
                node = child
        return _proposals(placed, len(rids) if trees is None else trees.rows) if placed else None


def _child(trees: DraftTrees, row: int, parent: int, token_id: int) -> int | None:
    """The child of `parent` with this token; None if there is none."""
    nodes = slice(1, int(trees.sizes[row]))
    found = (trees.parents[row, nodes] == parent) & (trees.token_ids[row, nodes] == token_id)
    return 1 + int(found.argmax()) if found.any() else None


def _proposals(placed: dict[int, DrawnToken], nodes: int) -> Proposals:
    most = max(len(drawn.candidate_ids) for drawn in placed.values())
    token_ids = np.zeros(nodes, np.int64)
    candidate_ids = np.zeros((nodes, most), np.int64)
    candidate_probs = np.zeros((nodes, most))
    for node, drawn in placed.items():
        count = len(drawn.candidate_ids)
        token_ids[node] = drawn.token_id
        candidate_ids[node, :count] = drawn.candidate_ids
        candidate_probs[node, :count] = drawn.candidate_probs
    known = torch.zeros(nodes, dtype=torch.bool)
    known[list(placed)] = True
    arrays = (token_ids, candidate_ids, candidate_probs)
    return Proposals(known, *map(torch.from_numpy, arrays))
