"""The drafts of a simulated target, in place of a server's `Speculator`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.policy import FirstTokens, LastRequests, Sources, passes_left
from sglang_qspec.policy.totals import Totals
from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.clock import Clock
from sglang_qspec.tools.plan.requests import SimulatedRequest
from sglang_qspec.tools.plan.sidecar import TargetLink
from sglang_qspec.trie import DraftTrees, Source

RIGHT, WRONG = 1, 2
"""Token ids: all tokens of the target are `RIGHT`."""


class SimulatedDrafts:
    """Implements `engine.passes.decide.drafts.Drafts` for the requests of one target.

    Each tree is a chain with the draft tokens that have arrived. A node's score is the average
    agreement to the power of its depth.
    """

    def __init__(
        self,
        clock: Clock,
        tables: Tables,
        sidecar: TargetLink,
        rng: np.random.Generator,
        *,
        reports: bool = True,
        matches_again: bool = False,
    ) -> None:
        """With `reports` the target reports its tokens to the sidecar.

        With `matches_again` a text that has left its draft may return to it (`tables.again`).
        """
        self.totals = Totals()
        self.sources = Sources(clock.time)
        self.last_requests = LastRequests()
        self.sidecar = sidecar
        self._clock, self._rng = clock, rng
        self._reports = reports
        self._again = tables.again if matches_again else 0.0
        self._requests: dict[str, SimulatedRequest] = {}
        self.others_wait = False
        """Whether the target has a queue of requests."""

    @property
    def running(self) -> int:
        """Number of requests that are served now."""
        return len(self._requests)

    def admit(self, request: SimulatedRequest) -> None:
        """Serve a request. Its prefill has given the first output token."""
        self.last_requests.arrive()
        self._requests[request.rid] = request
        self._commit(request, 1)

    def right(self, rids: Sequence[str], trees: DraftTrees) -> list[list[int]]:
        """The nodes of each tree that the target accepts."""
        sizes = zip(rids, trees.sizes.tolist(), strict=True)
        return [list(range(1, self._requests[rid].right(size - 1) + 1)) for rid, size in sizes]

    def propose(
        self,
        rids: Sequence[str],
        outputs: Sequence[Sequence[int]],  # noqa: ARG002
        width: int,
        *,
        drafts: bool = True,
    ) -> DraftTrees:
        """A chain of at most `width` tokens for each request; `outputs` is not read."""
        requests = [self._requests[rid] for rid in rids]
        sizes = np.ones(len(requests), dtype=np.int32)
        if drafts and self._source not in self.sources.paused:
            sizes += [min(r.available, width - 1, r.size - r.done - 1) for r in requests]
        nodes = np.arange(width)
        inside = nodes < sizes[:, None]
        token_ids = np.full(inside.shape, RIGHT, dtype=np.int32)
        token_ids[[r.next_wrong[r.done] == r.done for r in requests]] = WRONG
        return DraftTrees(
            token_ids,
            np.broadcast_to(np.maximum(nodes - 1, 0).astype(np.int32), inside.shape).copy(),
            np.full(inside.shape, self._source, dtype=np.uint8),
            np.where(inside, np.power(self.totals.agreement, nodes), 0.0).astype(np.float32),
            sizes,
        )

    def factors(self, rids: Sequence[str]) -> NDArray[np.float64]:
        """Factor of each request's scores, from its credit."""
        return np.array([self._requests[rid].credit.factor for rid in rids])

    def longest_pass(self, rids: Sequence[str]) -> float:  # noqa: ARG002
        """No limit, because all requests have the same priority."""
        return math.inf

    def passes_left(self) -> dict[str, float]:
        """Expected number of passes to come (`policy.passes_left`), by running request."""
        return {
            rid: passes_left(request.size - request.done, request.done, request.accepted)
            for rid, request in self._requests.items()
        }

    def tokens_left(self, rids: Sequence[str]) -> list[int]:
        """Number of output tokens to come of each request; 0 for one that has ended."""
        requests = map(self._requests.get, rids)
        return [0 if request is None else request.size - request.done for request in requests]

    def awaited(self, rids: Sequence[str], trees: DraftTrees) -> NDArray[np.bool_]:
        """Which requests get step drafts that a wait could use."""
        awaited = np.zeros(len(rids), dtype=np.bool_)
        lookahead = self.sidecar.lookahead
        if not self.sidecar.ready or not lookahead:
            return awaited
        for row, (rid, size) in enumerate(zip(rids, trees.sizes.tolist(), strict=True)):
            if size < trees.width or lookahead < trees.width:
                request = self._requests[rid]
                awaited[row] = request.available < min(lookahead, request.size - request.done)
        return awaited

    def commit(
        self,
        rids: Sequence[str],
        trees: DraftTrees,  # noqa: ARG002
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],  # noqa: ARG002
    ) -> None:
        """Commit the accepted tokens and the bonus token of each request."""
        for rid, nodes in zip(rids, accepted, strict=True):
            self._commit(self._requests[rid], len(nodes) + 1)

    def count(
        self,
        rids: Sequence[str],  # noqa: ARG002
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        *,
        prefill: bool = False,  # noqa: ARG002
    ) -> None:
        """Count the draft tokens of a pass."""
        self.totals.record(trees, accepted)
        if self._source is Source.QUEUE:  # `Totals` learns the agreement of step drafts alone
            for nodes, size in zip(accepted, trees.sizes.tolist(), strict=True):
                if size > 1:
                    self.totals.learn_agreement(len(nodes), missed=len(nodes) < size - 1)

    def update_credit(self, rids: Sequence[str], offered: DraftTrees, first: FirstTokens) -> None:
        """Update the credit of each request by the first tokens of its `offered` chain."""
        claimed: list[float] = np.where(first.proposed, offered.scores, 0.0).sum(axis=1).tolist()
        right: list[int] = first.right.sum(axis=1).tolist()
        for row, rid in enumerate(rids):
            # A request that has ended in this pass needs no credit.
            if claimed[row] and rid in self._requests:
                self._requests[rid].credit.observe(claimed[row], right[row] > 0)

    def take_link_seconds(self) -> float:
        """0.0: messages take no time of the target."""
        return 0.0

    @property
    def _source(self) -> Source:
        """The source of all drafts of the present round."""
        return self.sidecar.source if self.sidecar.lookahead else Source.QUEUE

    def _commit(self, request: SimulatedRequest, tokens: int) -> None:
        """Add output tokens, and report them to the sidecar."""
        tokens = min(tokens, request.size - request.done)
        request.done += tokens
        request.accepted += tokens - 1
        if request.done == request.size:
            request.finished = self._clock.now
            del self._requests[request.rid]
            self.last_requests.end(at_limit=True)
            if not self._requests:
                self.last_requests.end_batch()
            self.sidecar.close(request)
        elif self._reports:
            self._report(request)

    def _report(self, request: SimulatedRequest) -> None:
        left = request.next_wrong[request.seen_begin] < request.done
        if self._again and left and self._rng.random() < self._again:
            # The text has left the queue draft, and matches a later place of it.
            request.seen_begin = request.done
        self.sidecar.commit(request)
