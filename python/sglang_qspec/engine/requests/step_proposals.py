"""What step drafts were drawn from, kept until the target has decided the places they stand at.

The target draws near such a token (`verify.rejection`), so that its text is the draft's as often
as it can be. Why that is exact, whatever the sidecar's distributions are:

- A token x comes with the distribution q that it was drawn from, given the text before it, by
  numbers of the sidecar's own. The sidecar knows nothing of the target's numbers but what the
  committed text tells: it has no seed, and its first completions are greedy. So while the target
  has not decided x's place, its numbers for that place depend on nothing that has come or that
  will, and x depends on them as little.
- Once x has come it counts, in whatever pass its place is decided behind the draft's own tokens:
  in a tree or beside it, at a leaf, in a pass without drafts, in that of a retracted prompt. Before
  it has come nothing depends on it. Whether a place is decided with x or without is thus no matter
  of what x is; were x tested only where the tree or the pass suits it, it would be.
- x counts once. Every pass decides the place behind the committed output, and each place behind a
  node that it accepts; other draws of it are thrown away. What remains of a draft is read from the
  end of the output on, and only while all before that is the draft's own, so that a place which is
  decided is never drawn near anything again, and a token that comes too late is dropped.
- Where drafts overlap, as after a retraction, the earlier one counts for as long as it lasts. The
  later one is not looked at to choose between them.

A token without its candidates, or behind a gap, is a guess like any other: drawn independently of
the target's numbers, it changes nothing of what the target draws.
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
"""Kept for one request: twice as far as step drafts run ahead at most, since what has been decided
goes only when the next pass asks."""


class DrawnToken(NamedTuple):
    """A token of a step draft, and what it was drawn from."""

    token_id: int
    candidate_ids: NDArray[np.int64]
    candidate_probs: NDArray[np.float64]

    @classmethod
    def told(cls, token_id: int, candidates: Candidates) -> DrawnToken:
        probs = np.array(candidates.probs)
        return cls(token_id, np.array(candidates.token_ids), probs / probs.sum())


class _Draft:
    """One step draft: what has come of it and is not decided yet."""

    def __init__(self, name: tuple[int, int], base_len: int) -> None:
        self.name = name
        """Its submission, and its number there."""
        self.received = 0
        self.tokens: deque[DrawnToken] = deque()
        self._place = base_len
        """Output position of the first of `tokens`."""

    def follow(self, output_ids: Sequence[int]) -> bool:
        """Drop what is decided; whether all of it came out as drafted."""
        if self._place > len(output_ids):  # what comes before it is not known
            return False
        for token_id in output_ids[self._place : self._place + len(self.tokens)]:
            if self.tokens.popleft().token_id != token_id:
                return False
            self._place += 1
        return True


class StepProposals:
    """The drawn step drafts of all requests, by rid."""

    def __init__(self) -> None:
        self._drafts: dict[str, deque[_Draft]] = {}

    def __len__(self) -> int:
        """Requests with any."""
        return len(self._drafts)

    def take(self, rid: str, drafted: Drafted) -> None:
        """More of a step draft has come. What does not join on to the rest of it is ignored."""
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
            drafts[-1].tokens += map(DrawnToken.told, drafted.token_ids, drafted.candidates)

    def end(self, rid: str) -> None:
        """The request is over."""
        self._drafts.pop(rid, None)

    def ahead(self, rid: str, output_ids: Sequence[int]) -> Sequence[DrawnToken]:
        """The tokens drawn for the places behind the committed output, in order."""
        drafts = self._drafts.get(rid)
        while drafts:
            followed = drafts[0].follow(output_ids)
            if followed and (drafts[0].tokens or len(drafts) == 1):  # which may go on
                return drafts[0].tokens
            drafts.popleft()
        self._drafts.pop(rid, None)
        return ()

    def proposals(
        self, rids: Sequence[str], outputs: Sequence[Sequence[int]], trees: DraftTrees | None = None
    ) -> Proposals | None:
        """Near what the target is to draw at every node of the trees; None for nothing anywhere.

        `outputs` are the committed tokens of each request. Without trees there are only roots.
        """
        if not self._drafts:
            return None
        width = trees.width if trees is not None else 1
        placed: dict[int, DrawnToken] = {}
        for row, (rid, output_ids) in enumerate(zip(rids, outputs, strict=True)):
            node = 0
            for drawn in self.ahead(rid, output_ids):
                placed[row * width + node] = drawn
                child = _child(trees, row, node, drawn.token_id) if trees is not None else None
                if child is None:
                    break
                node = child
        return _proposals(placed, len(rids) * width) if placed else None


def _child(trees: DraftTrees, row: int, parent: int, token_id: int) -> int | None:
    """The node behind `parent` with this token, of which there is one at most."""
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
