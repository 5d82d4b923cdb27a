"""Which sources of draft tokens pay: what each saves and costs, and a pause for those that do not.

An accepted token saves its share of a plain decode pass; the rows of a wider pass, waits, and talk
with the sidecar cost time. Scores, credit and the width see to it that few tokens are verified that
are not worth it, but they are estimates, and a source costs time before a token of it is chosen.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from sglang_qspec.policy.credit import FirstTokens
from sglang_qspec.trie import DraftTrees, Source

FEWEST_TOKENS = 64
"""That a source is judged by, unless fewer leave no doubt."""
DOUBT = 3.0
"""Standard deviations; with none right, 14 tokens leave no doubt."""
WINDOW_TOKENS = 512
"""Half of what is known of a source is forgotten when it is known by so many tokens."""
LOW_RATE = 0.4
"""A source of which a larger share is accepted is never paused."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 320.0
WARNING_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


@dataclass
class _Ledger:
    """Of one source, lately."""

    tokens: float = 0.0
    """That were verified, or seen to be right or wrong without that."""
    right: float = 0.0
    saved: float = 0.0
    """Seconds, as is the cost."""
    cost: float = 0.0
    until: float | None = None
    """When its pause ends; None if it is not paused."""
    pause: float = FIRST_PAUSE_S
    """How long its next one is."""

    @property
    def rate(self) -> float:
        return self.right / self.tokens if self.tokens else 0.0

    @property
    def is_low(self) -> bool:
        """Whether its rate is below `LOW_RATE`, and not by chance."""
        shortfall = LOW_RATE * self.tokens - self.right
        deviation = sqrt(LOW_RATE * (1 - LOW_RATE) * self.tokens)
        least = 0.0 if self.tokens >= FEWEST_TOKENS else DOUBT * deviation
        return shortfall > least

    def scale(self, factor: float) -> None:
        """Forget a part of it, or with 0 all."""
        self.tokens *= factor
        self.right *= factor
        self.saved *= factor
        self.cost *= factor


class Sources:
    """Pauses a source whose drafts are seldom accepted and cost more than they save.

    A pause ends by itself. What is drafted then is a probe: if it does not pay either, the next
    pause is twice as long; if it does, the source is as any other.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ledgers = {source: _Ledger() for source in Source}
        self._warn_at = -WARNING_INTERVAL_S

    @property
    def paused(self) -> frozenset[Source]:
        """Those that nothing is to be drafted or proposed of."""
        now = self._clock()
        for ledger in self._ledgers.values():
            if ledger.until is not None and now >= ledger.until:
                ledger.until = None
        return frozenset(s for s, ledger in self._ledgers.items() if ledger.until is not None)

    def record(
        self,
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        *,
        token_seconds: float,
        extra_seconds: float,
    ) -> None:
        """A pass over `trees` has accepted these nodes of each.

        `token_seconds` is what a token of a plain decode pass takes, and `extra_seconds` what this
        pass took more than a plain one: each draft token has cost as much as any other.
        """
        proposed = trees.count_by_source()
        right = Counter(
            Source(trees.sources[row, node]) for row, nodes in enumerate(accepted) for node in nodes
        )
        each = extra_seconds / max(1, sum(proposed.values()))
        for source, tokens in proposed.items():
            if tokens:
                saved = token_seconds * right[source]
                self.observe(source, tokens, right[source], saved, each * tokens)

    def judge(self, trees: DraftTrees, first: FirstTokens) -> None:
        """A plain pass has shown which of the trees' `first` tokens are right."""
        proposed = np.bincount(trees.sources[first.proposed], minlength=len(Source)).tolist()
        right = np.bincount(trees.sources[first.right], minlength=len(Source)).tolist()
        for source in Source:
            if proposed[source]:
                self.observe(source, proposed[source], right[source])

    def observe(
        self, source: Source, tokens: int, right: int, saved: float = 0.0, cost: float = 0.0
    ) -> None:
        """`right` of so many tokens were the target's; it `saved` and `cost` so many seconds."""
        ledger = self._ledgers[source]
        if ledger.until is not None:
            return  # the rest of what was drafted before
        ledger.tokens += tokens
        ledger.right += right
        ledger.saved += saved
        ledger.cost += cost
        if ledger.is_low and ledger.cost > ledger.saved:
            self._pause(source, ledger)
        elif ledger.tokens >= FEWEST_TOKENS:
            ledger.pause = FIRST_PAUSE_S
        if ledger.tokens >= WINDOW_TOKENS:
            ledger.scale(0.5)

    def describe(self) -> dict[str, dict[str, Any]]:
        """For /server_info: by source, whether it is paused and what it has been worth lately."""
        paused = self.paused
        return {
            source.name.lower(): {
                "paused": source in paused,
                "accept_rate": ledger.rate,
                "saved_seconds": ledger.saved,
                "cost_seconds": ledger.cost,
            }
            for source, ledger in self._ledgers.items()
        }

    def _pause(self, source: Source, ledger: _Ledger) -> None:
        now = self._clock()
        ledger.until = now + ledger.pause
        if now - self._warn_at >= WARNING_INTERVAL_S:
            self._warn_at = now
            logger.warning(
                "Drafts of source %r cost more than they save: %.0f %% of them are right, which "
                "lately saved %.3f s and cost %.3f s. It is paused for %.0f s, then tried again.",
                source.name.lower(),
                100 * ledger.rate,
                ledger.saved,
                ledger.cost,
                ledger.pause,
            )
        ledger.pause = min(2 * ledger.pause, LONGEST_PAUSE_S)
        ledger.scale(0.0)
