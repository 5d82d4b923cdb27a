"""The measurements that decide which drafts batches of about one size use.

A trial serves a window of decoding in another way than the present decision, and the output tokens
per second of both are compared.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any

logger = logging.getLogger(__name__)


class DraftUse(Enum):
    """The drafts that the passes of a decode round verify."""

    ALL = "all"
    """All drafts. The sidecar drafts for running requests, on cores of its own if there are any."""
    TEXTS = "texts"
    """Those that need no sidecar beside the target: lookups, guesses, and completions from the time
    before the request was served. The target has all cores."""
    NONE = "none"
    """No drafts: plain decoding. The target has all cores."""


ALL, TEXTS, NONE = DraftUse
DESCRIPTION = {
    ALL: "all drafts",
    TEXTS: "only drafts that need no sidecar beside the target",
    NONE: "no drafts",
}
"""Each use, for the log."""
WINDOW_S = {ALL: 1.5, TEXTS: 1.5, NONE: 0.5}
"""Seconds of decoding that are measured as a whole. Plain passes differ least."""
FEWEST = 8
"""Number of passes that a window has at least, however long they are."""
FIRST_GAP, LONGEST_GAP = {ALL: 16, TEXTS: 2, NONE: 6}, 128
"""Time between two trials of another use, in windows of that use: FIRST_GAP at first, then four
times the last gap, up to LONGEST_GAP. The shorter a trial, the sooner it comes."""
LOSS = 0.01
"""Share of the decoding time that the trials of one use may lose, by what is known of its rate."""
CLEAR = 0.85
"""Share of the present use's rate below which a third of a window ends a trial, of the tried one's
rate below which the present use gives way at once, and of the rate without drafts below which a
forecast of the sidecar's drafts decides."""
WEIGHT = 0.5
"""Weight of the latest window in the rate of a use."""
MARGIN = 1.03
"""Factor by which another use must be faster to replace the present one."""
EAGER = 0.25
"""Excess of the last known rate of another use over MARGIN times the present one at which a trial
of it is due after one window: the texts or the machine have changed, or an earlier trial misled."""
STALE = 8
"""Windows of a use after which its measured rate says nothing about the next one."""
COMPARISONS = 8
"""Number of the latest comparisons with plain decoding that are shown."""


@dataclass
class TrialLevel:
    """Measurements and decision for batch sizes of one binary order of magnitude."""

    least: int
    """Smallest batch size."""
    use: DraftUse
    """The decision."""
    uses: Sequence[DraftUse]
    """All uses that are tried."""
    warm_up_s: Mapping[DraftUse, float]
    """Seconds of the latest warm-up of each use."""
    trial: DraftUse | None = None
    """The use that is being tried in place of the decision."""
    plain: bool = True
    """Whether rounds without drafts are allowed now."""
    rates: dict[DraftUse, float] = field(default_factory=dict)
    """Output tokens per second by use: moving averages over windows."""
    gaps: dict[DraftUse, int] = field(default_factory=lambda: dict(FIRST_GAP))
    """Windows before the next trial of each use."""
    since: dict[DraftUse, float] = field(default_factory=lambda: dict.fromkeys(DraftUse, 0.0))
    """Measured seconds since the last trial of each use."""
    last_rate: float = 0.0
    """Output tokens per second of the decision's last window."""
    tried: tuple[DraftUse, float] | None = None
    """A use that was somewhat faster in its trial than the decision in the window before, and its
    rate there; the window after the trial decides."""
    over_none: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARISONS))
    """Rates with drafts over rates without, of the latest comparisons."""
    pass_seconds: float = 0.0
    """Mean time of a pass in the last window of the decision."""
    unmeasured: int = 0
    """Rounds before the first window was measured."""
    passes: int = 0
    """Number of passes in the present window."""
    seconds: float = 0.0
    """Their time."""
    tokens: int = 0
    """Their output tokens."""
    drafted: int = 0
    """Those that the sidecar drafted."""

    @property
    def wanted(self) -> DraftUse:
        """The use of the present window."""
        return self.use if self.trial is None else self.trial

    def allow(self, *, plain: bool) -> None:
        """Allow rounds without drafts, or end them."""
        self.plain = plain
        if plain or self.wanted is not NONE:
            return
        self.trial = self.tried = None
        if self.use is NONE:
            self.use = self.uses[-2]
        self._clear()

    @property
    def measured(self) -> bool:
        """Whether the decision follows from measurements of at least two uses."""
        return len(self.rates) > 1

    @property
    def is_over(self) -> bool:
        """Whether the present window ends now: it is full, or a trial is clearly slower."""
        share = min(self.seconds / WINDOW_S[self.wanted], self.passes / FEWEST)
        if share >= 1.0:
            return True
        slower = self.tokens < CLEAR * self.rates.get(self.use, 0.0) * self.seconds
        return self.trial is not None and slower and share >= 1 / 3

    def conclude(self, predicted: dict[DraftUse, float]) -> None:
        """End a window, and with it a trial, or begin one.

        `predicted` has the tokens per second that other uses may give, as far as that is known. For
        TEXTS it is an upper limit.
        """
        rate = self.tokens / self.seconds
        if self.trial is not None:
            self._end_trial(rate)
        else:
            before, self.last_rate = self.last_rate, rate
            self.pass_seconds = self.seconds / self.passes
            self.rates[self.use] = self._average(rate)
            for other in self.since:
                self.since[other] += self.seconds
            if self.tried is None:
                self.trial = self._next_trial(predicted)
            else:
                self._decide(max(before, rate))
                self.tried = None
        self._clear()

    def _clear(self) -> None:
        """Begin a window."""
        self.passes, self.seconds, self.tokens, self.drafted = 0, 0.0, 0, 0

    def _average(self, rate: float) -> float:
        before = self.rates.get(self.wanted, rate)
        stale = self.trial is not None and self.since[self.trial] > STALE * WINDOW_S[self.trial]
        return rate if stale else before + WEIGHT * (rate - before)

    def _next_trial(self, predicted: dict[DraftUse, float]) -> DraftUse | None:
        """The use to try in the next window, if one is due."""
        due = {
            other: self.since[other] / self._gap(other, predicted.get(other))
            for other in self.uses
            if other is not self.use and (self.plain or other is not NONE)
        }
        latest = max(due, key=due.__getitem__, default=None)
        return latest if latest is not None and due[latest] >= 1.0 else None

    def _gap(self, other: DraftUse, predicted: float | None) -> float:
        """Seconds before the next trial of a use, so that its trials lose at most `LOSS`."""
        window = max(WINDOW_S[other], FEWEST * self.pass_seconds)
        gap = self.gaps[other] * window
        known = self.rates.get(other, predicted)
        if known is None:
            return gap
        present = self.rates[self.use]
        if other is TEXTS and predicted is not None and present > MARGIN * predicted:
            return math.inf  # it cannot win
        if (excess := known / present - MARGIN) > 0.0 and other in self.rates:
            eager = min(1.0, excess / EAGER)
            return gap + eager * (WINDOW_S[self.use] - gap)
        lost = max(0.0, 1.0 - known / present) * (self.warm_up_s[other] + window / 3)
        return max(gap, lost / LOSS)

    def _end_trial(self, rate: float) -> None:
        """End a trial that gave this rate."""
        assert self.trial is not None
        self.rates[self.trial] = self._average(rate)
        self.tried, self.trial = (self.trial, rate), None
        self.since[self.tried[0]] = 0.0
        if not MARGIN * self.last_rate < rate < self.last_rate / CLEAR:
            self._decide(self.last_rate)
            self.tried = None

    def _decide(self, present: float) -> None:
        """Decide whether the use that was tried replaces the decision, which gave `present`.

        The machine and the texts change with time. So a use that is not clearly faster must be
        faster than the decision both in the window before its trial and in the window after it.
        """
        assert self.tried is not None
        tried, rate = self.tried
        if NONE in (tried, self.use) and min(rate, present) > 0.0:
            self.over_none.append(present / rate if tried is NONE else rate / present)
        if rate <= MARGIN * present:
            self.gaps[tried] = min(4 * self.gaps[tried], LONGEST_GAP)
            return
        self.use, self.gaps, self.last_rate = tried, dict(FIRST_GAP), rate
        self.since = dict.fromkeys(DraftUse, 0.0)
        logger.info(
            "Batches of %d to %d requests: %s, for %.0f tokens/s instead of %.0f.",
            self.least,
            2 * self.least - 1,
            DESCRIPTION[tried],
            rate,
            present,
        )

    def describe(self) -> dict[str, Any]:
        """The level for /server_info."""
        ratios = sorted(self.over_none)
        return {
            "requests": [self.least, 2 * self.least - 1],
            "drafts": self.use.value,
            "tokens_per_s": {use.value: round(rate, 1) for use, rate in self.rates.items()},
            "over_none": round(median(ratios), 3) if ratios else None,
            "over_none_range": [round(ratio, 3) for ratio in (ratios[0], ratios[-1])]
            if ratios
            else None,
            "comparisons": len(ratios),
        }
