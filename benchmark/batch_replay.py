"""Replays recorded requests in batches, in passes with a given total of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from benchmark.replay import LOOKAHEAD, Recorded, accepted
from sglang_qspec.policy import Credit, FirstTokens, spend
from sglang_qspec.trie import DraftTrees, RequestTrie, Source, TrieLimits, Trust
from sglang_qspec.trie._native import propose

VOCAB = 1 << 18
WIDEST = 64
"""Largest tree of a ragged pass, in nodes."""
STAGGER = 17
"""Tokens by which the first requests of a batch are further than those before them."""


class Shape(Enum):
    """How a pass spends its rows."""

    TREES = "trees of one width"
    CHAINS = "chains of one width"
    RAGGED_TREES = "ragged trees"
    RAGGED_CHAINS = "ragged chains"

    @property
    def ragged(self) -> bool:
        return self in (Shape.RAGGED_TREES, Shape.RAGGED_CHAINS)

    @property
    def chains(self) -> bool:
        return self in (Shape.CHAINS, Shape.RAGGED_CHAINS)


@dataclass
class Yield:
    """Sums over the passes of a run."""

    tokens: int = 0
    """Output tokens."""
    rows: int = 0
    """Tokens that the passes ran, padding included."""
    requests: int = 0
    """Batch sizes."""

    @property
    def accept_length(self) -> float:
        """Output tokens of a request and pass."""
        return self.tokens / self.requests

    @property
    def per_row(self) -> float:
        return self.tokens / self.rows


@dataclass
class _Running:
    request: Recorded
    trie: RequestTrie
    done: int
    """Output tokens so far."""
    steps: bool
    credit: Credit = field(default_factory=Credit)
    draft: int = -1
    """Index of the present step draft."""
    received: int = 0
    """Tokens of the present step draft in the trie."""

    def receive(self) -> None:
        """Insert what the sidecar has drafted ahead of the output by now."""
        drafts = self.request.step_drafts if self.steps else []
        while self.draft + 1 < len(drafts) and drafts[self.draft + 1][0] <= self.done:
            self.draft, self.received = self.draft + 1, 0
        if self.draft < 0:
            return
        base_len, token_ids = drafts[self.draft]
        fresh = token_ids[self.received : self.done - base_len + LOOKAHEAD]
        if fresh:
            self.trie.insert(Source.STEP, 1 << 20 | self.draft, base_len, self.received, fresh)
            self.received += len(fresh)


def serve(
    requests: Sequence[Recorded],
    shape: Shape,
    *,
    batch: int,
    width: int,
    completions: int,
    steps: float,
) -> Yield:
    """Decode the requests with `batch` of them at a time, and `batch * width` rows a pass.

    A request that ends makes room for the next one; the run ends when there is none, so all passes
    have the same batch size. `steps` is the share of requests for which the drafter runs ahead of
    the output, as far as it may.
    """
    limits = TrieLimits(vocab_size=VOCAB)
    trust = Trust(limits.max_match)
    waiting = [requests[n % len(requests)] for n in range(max(len(requests), 2 * batch))]
    running: list[_Running] = []
    sums = Yield()
    started = 0
    while len(running) + len(waiting) >= batch:
        while len(running) < batch:
            ahead = 1 + STAGGER * len(running) if not sums.rows else 1
            request = waiting.pop(0)
            done = 1 + (ahead - 1) % max(1, len(request.target_ids) // 2)
            stepping = int((started + 1) * steps) > int(started * steps)
            started += 1
            running.append(_started(request, limits, trust, done, completions, stepping))
        sums.requests += batch
        sums.rows += _pass(running, shape, width, limits, sums)
        running = [one for one in running if one.done < len(one.request.target_ids)]
    return sums


def _started(
    request: Recorded, limits: TrieLimits, trust: Trust, done: int, completions: int, steps: bool
) -> _Running:
    trie = RequestTrie(request.prompt_ids, limits, trust=trust)
    for number, draft in enumerate(request.draft_ids[:completions]):
        trie.insert(Source.QUEUE, number, 0, 0, draft, greedy=number == 0)
    trie.commit(request.target_ids[:done])
    return _Running(request, trie, done, steps)


def _pass(
    running: Sequence[_Running], shape: Shape, width: int, limits: TrieLimits, sums: Yield
) -> int:
    """Run a pass, and add its output tokens to `sums`. Returns its rows."""
    for one in running:
        one.receive()
    tries = [one.trie for one in running]
    widest = WIDEST if shape.ragged or shape.chains else width
    arrays = propose(tries, [trie.last_token for trie in tries], widest, limits.min_score, 0)
    offered = DraftTrees(*arrays)
    trees = offered.chains() if shape.chains else offered
    if shape.ragged:
        gains = trees.scores * np.array([[one.credit.factor] for one in running])
        trees = trees.cut(spend(gains, (width - 1) * len(running)))
    else:
        trees = trees.best(width)
    next_ids = []
    for row, one in enumerate(running):
        target = one.request.target_ids
        next_ids.append(target[one.done])
        token_ids, parents = trees.token_ids[row], trees.parents[row]
        nodes = accepted(token_ids, parents, int(trees.sizes[row]), target, one.done)
        step = target[one.done : one.done + len(nodes) + 1]
        one.trie.commit(step)
        one.done += len(step)
        sums.tokens += len(step)
    first = FirstTokens.of(offered, np.array(next_ids, np.int32))
    claimed: list[float] = np.where(first.proposed, offered.scores, 0.0).sum(axis=1).tolist()
    right_ones: list[int] = first.right.sum(axis=1).tolist()
    for one, claim, right in zip(running, claimed, right_ones, strict=True):
        if claim:
            one.credit.observe(claim, right > 0)
    return trees.rows
