"""Updates all statistics after a decode pass: tallies, pass times, credit, and what sources pay."""

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
    """What one pass verifies."""

    trees: DraftTrees
    """Trees of the pass, at the width of the pass."""
    candidates: DraftTrees | None = None
    """Trees that the pass's trees were cut from; None if the pass decodes without drafts."""
    waited: float = 0.0
    """Seconds that the proposer waited for step drafts."""


class PassAccounting:
    """Owns the times of passes, and passes each result on to those who learn from it."""

    def __init__(
        self,
        speculator: Speculator,
        runtime: RuntimeSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.times = PassTimes()
        self._speculator = speculator
        self._runtime = runtime
        self._clock = clock
        self._began: float | None = None
        """Start of the present pass: the end of the last one; None after an interruption."""

    def begin(self) -> None:
        """A pass begins. Its time counts from the end of the last pass, if that was just before."""
        if self._began is None:
            self._began = self._clock()

    def interrupt(self) -> None:
        """Something else than a decode pass runs: the next pass does not follow the last one."""
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
        """A pass is done. `accepted` are the confirmed nodes of each tree in order; `bonus_ids` the
        tokens that the target chose behind them."""
        trees = proposal.trees
        self._speculator.record(rids, trees, accepted, bonus_ids)
        now = self._clock()
        assert self._began is not None
        seconds = now - self._began - proposal.waited
        self._began = now
        self.times.observe(len(trees), trees.width, seconds)
        tokens = len(trees) * trees.width
        self._speculator.totals.note_pass(pipeline, len(trees), tokens, seconds, proposal.waited)
        self._judge(rids, proposal, accepted, bonus_ids)

    def _judge(
        self,
        rids: Sequence[str],
        proposal: Proposal,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """Learn from a pass how good the candidates were, and which sources pay."""
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
                # With one width, rows without drafts would only be padding.
                extra_seconds=0.0 if self._runtime.fixed_width else max(0.0, extra),
            )
        else:
            sources.judge(candidates, first)
        source = Source.STEP if self._speculator.sidecar.lookahead else Source.QUEUE
        sources.observe(source, 0, 0, cost=proposal.waited + link_seconds)
