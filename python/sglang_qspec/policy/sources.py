"""Pauses draft sources that cost more time than they save.

An accepted token saves its share of a plain decode pass. Wider passes, waits and the link to the
sidecar cost time. Scores, credit and width already avoid most draft tokens that do not pay, but
they are estimates, and a source costs time before any of its tokens is chosen.
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

FEWEST_TOKENS, FEWEST_TREES = 64, 32
"""Number of tokens, and of trees that had them, after which a low accept rate counts; see `DOUBT`
for less evidence."""
DOUBT = 3.0
"""Standard deviations below `LOW_RATE` at which less evidence suffices: 14 trees if no token is
right. The tokens of a tree fail together, so they count as one."""
WINDOW_TOKENS, WINDOW_TREES = 512, 64
"""Tokens and trees at which the counts of a source are halved, so that recent passes count more."""
LOW_RATE = 0.4
"""Accept rate from which a source is never paused."""
FIRST_PAUSE_S = 5.0
"""Length of the first pause, in seconds."""
LONGEST_PAUSE_S = 320.0
"""Maximum length of a pause, in seconds."""
WARNING_INTERVAL_S = 60.0
"""Minimum number of seconds between two warnings."""

logger = logging.getLogger(__name__)


@dataclass
class _Ledger:
    """Recent savings and costs of one source."""

    tokens: float = 0.0
    """Draft tokens that were verified, or compared with the token of a plain pass."""
    trees: float = 0.0
    """Number of trees that had the tokens."""
    right: float = 0.0
    """Number of `tokens` that were the target's."""
    saved: float = 0.0
    """Seconds of plain decoding that the accepted tokens saved."""
    cost: float = 0.0
    """Seconds that the drafts cost."""
    until: float | None = None
    """Clock time at which the pause ends; None if the source is not paused."""
    pause: float = FIRST_PAUSE_S
    """Length of the next pause in seconds."""

    @property
    def rate(self) -> float:
        return self.right / self.tokens if self.tokens else 0.0

    @property
    def is_low(self) -> bool:
        """Whether the accept rate is below `LOW_RATE`, on enough evidence."""
        shortfall = LOW_RATE * self.tokens - self.right
        if self.tokens >= FEWEST_TOKENS and self.trees >= FEWEST_TREES:
            return shortfall > 0.0
        of_a_tree = self.tokens / max(1.0, self.trees)
        deviation = of_a_tree * sqrt(LOW_RATE * (1 - LOW_RATE) * self.trees)
        return shortfall > DOUBT * deviation

    def scale(self, factor: float) -> None:
        """Multiply all counts by `factor`; 0 resets them."""
        self.tokens *= factor
        self.trees *= factor
        self.right *= factor
        self.saved *= factor
        self.cost *= factor


class Sources:
    """Pauses a source whose drafts are seldom accepted and cost more than they save.

    A pause ends by itself, and the source is tried again. If its drafts still do not pay, the next
    pause is twice as long; if they do, it is reset to `FIRST_PAUSE_S`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ledgers = {source: _Ledger() for source in Source}
        self._warn_at = -WARNING_INTERVAL_S

    @property
    def paused(self) -> frozenset[Source]:
        """Sources from which no token may be drafted or proposed now."""
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
        """Record a pass over `trees`, with the `accepted` nodes of each tree.

        `token_seconds` is the time of one token in a plain decode pass. `extra_seconds` is how much
        longer this pass took than a plain one; all draft tokens share it equally.
        """
        proposed = trees.count_by_source()
        right = Counter(
            Source(trees.sources[row, node]) for row, nodes in enumerate(accepted) for node in nodes
        )
        each = extra_seconds / max(1, sum(proposed.values()))
        drafted = trees.scores > 0
        drafted[:, :1] = False  # the roots
        for source, tokens in proposed.items():
            if tokens:
                having = int((drafted & (trees.sources == source)).any(axis=1).sum())
                saved = token_seconds * right[source]
                self.observe(source, tokens, right[source], saved, each * tokens, trees=having)

    def update(self, trees: DraftTrees, first: FirstTokens) -> None:
        """Record which of the trees' `first` tokens a plain pass has shown to be right."""
        proposed = np.bincount(trees.sources[first.proposed], minlength=len(Source)).tolist()
        right = np.bincount(trees.sources[first.right], minlength=len(Source)).tolist()
        for source in Source:
            if proposed[source]:
                self.observe(source, proposed[source], right[source])

    def observe(
        self,
        source: Source,
        tokens: int,
        right: int,
        saved: float = 0.0,
        cost: float = 0.0,
        *,
        trees: int | None = None,
    ) -> None:
        """Record that `right` of `tokens` were the target's, with the seconds saved and spent.

        `trees` is the number of trees that had the tokens; by default each token had its own. The
        source is paused if it does not pay. While it is paused, observations are ignored.
        """
        ledger = self._ledgers[source]
        if ledger.until is not None:
            return  # these tokens were drafted before the pause
        ledger.tokens += tokens
        ledger.trees += tokens if trees is None else trees
        ledger.right += right
        ledger.saved += saved
        ledger.cost += cost
        if ledger.is_low and ledger.cost > ledger.saved:
            self._pause(source, ledger)
        elif ledger.tokens >= FEWEST_TOKENS and ledger.trees >= FEWEST_TREES:
            ledger.pause = FIRST_PAUSE_S
        if ledger.tokens >= WINDOW_TOKENS and ledger.trees >= WINDOW_TREES:
            ledger.scale(0.5)

    def describe(self) -> dict[str, dict[str, Any]]:
        """For /server_info: pause state, accept rate, savings and cost of each source."""
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
                "Drafts of source %r cost more than they save: %.0f %% of the tokens were right, "
                "which saved %.3f s and cost %.3f s. The source is paused for %.0f s and then "
                "tried again.",
                source.name.lower(),
                100 * ledger.rate,
                ledger.saved,
                ledger.cost,
                ledger.pause,
            )
        ledger.pause = min(2 * ledger.pause, LONGEST_PAUSE_S)
        ledger.scale(0.0)
