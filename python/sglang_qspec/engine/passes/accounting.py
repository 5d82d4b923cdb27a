"""Updates all statistics after a decode pass: tallies, pass times, credit and draft sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_qspec.engine.requests.runtime_settings import RuntimeSettings
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import FirstTokens, PassTimes
from sglang_qspec.trie import DraftTrees, Source


@dataclass(frozen=True)
class Proposal:
    """The trees that one pass verifies."""

    trees: DraftTrees
    """Trees of the pass, at the width of the pass."""
    candidates: DraftTrees | None = None
    """The wider trees that `trees` are cut from; None for a pass that may not use drafts."""
    waited: float = 0.0
    """Seconds that the proposer waited for step drafts."""


class PassAccounting:
    """Owns the pass times, and updates all statistics with the result of each pass."""

    def __init__(
        self,
        speculator: Speculator,
        runtime: RuntimeSettings,
        clock: Callable[[], float] = time.monotonic,
        *,
        times: PassTimes | None = None,
    ) -> None:
        self.times = times or PassTimes()
        self._speculator = speculator
        self._runtime = runtime
        self._clock = clock
        self._began: float | None = None
        """Start of the present pass by the clock, usually the end of the last pass; None after an
        interruption."""

    def begin(self) -> None:
        """Start a pass. Its time counts from the last pass's end, after `interrupt` from now."""
        if self._began is None:
            self._began = self._clock()

    def interrupt(self) -> None:
        """Note that the scheduler runs something else, so the next pass counts from its start."""
        self._began = None
        self._speculator.take_link_seconds()

    def record(
        self,
        rids: Sequence[str],
        pipeline: str,
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """Record the result of a pass.

        `accepted` has the accepted nodes of each tree in order, `bonus_ids` the target's own token
        after them.
        """
        trees = proposal.trees
        self._speculator.record(rids, trees, accepted, bonus_ids)
        now = self._clock()
        assert self._began is not None
        seconds = now - self._began - proposal.waited
        self._began = now
        self.times.observe(len(trees), trees.width, seconds)
        tokens = len(trees) * trees.width
        self._speculator.totals.note_pass(pipeline, len(trees), tokens, seconds, proposal.waited)
        self._update_policies(rids, proposal, accepted, bonus_ids)

    def _update_policies(
        self,
        rids: Sequence[str],
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """Update the credit of each request, and the gain and cost of each draft source."""
        link_seconds = self._speculator.take_link_seconds()
        trees, candidates = proposal.trees, proposal.candidates
        if candidates is None:
            return
        next_ids = [
            trees.token_ids[row, nodes[0]] if nodes else bonus_ids[row]
            for row, nodes in enumerate(accepted)
        ]
        first = FirstTokens.of(candidates, np.array(next_ids, dtype=np.int32))
        self._speculator.update_credit(rids, candidates, first)
        sources = self._speculator.sources
        if trees.width > 1:
            plain = self.times.seconds(len(trees), 1)
            extra = self.times.seconds(len(trees), trees.width) - plain
            sources.record(
                trees,
                accepted,
                token_seconds=plain / len(trees),
                # With a fixed width, drafts only replace padding.
                extra_seconds=0.0 if self._runtime.fixed_width else max(0.0, extra),
            )
        else:
            sources.update(candidates, first)
        source = Source.STEP if self._speculator.sidecar.lookahead else Source.QUEUE
        sources.observe(source, 0, 0, cost=proposal.waited + link_seconds)
