"""Decides whether the sidecar drafts beside the target, by measured output tokens per second.

On a CPU, cores that draft are cores that do not verify. With few requests in flight drafts are
worth more; with many, or with texts that cannot be drafted, the target uses all cores better.
`CoreSplit` measures both in turn: it tries the other division for a moment, ever more seldom while
the decision stays the same. Batches of one binary order of magnitude share a decision, and begin
with that of smaller or larger batches.

On a device that both share, a sidecar that drafts slows the target down. `CoreSplit` decides in the
same way whether it drafts for running requests: what it costs is part of the measured rate.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

WARM_UP_S = {True: 1.5, False: 0.5}
"""Seconds of decoding after a change that do not count, by the new division. A sidecar that gets
its cores needs time to read the texts of the running requests."""
SETTLE_S = 0.25
"""Seconds of decoding after a change in which no other change comes; shorter than both warm-ups."""
WINDOW_S = 1.5
"""Seconds of decoding that are measured as a whole."""
FIRST_GAP, LONGEST_GAP = {True: 2, False: 16}, 128
"""Number of windows before a trial of the other division: FIRST_GAP of the present one at first,
then four times the last number, up to LONGEST_GAP. All cores are tried sooner, because that takes
less time."""
FEW = 4
"""Batch size below which the sidecar has cores of its own before anything is measured, if the
target doubles its cores without it. With a smaller ratio the limit is higher, because these cores
are worth less to the target."""
CLEAR = 0.85
"""Share of the present division's rate below which a third of a window ends a trial."""
DIVIDED = ("the sidecar has CPUs of its own", "the target has all CPUs")
SHARED = ("the sidecar drafts for running requests", "the sidecar does not draft for them")
"""Names of both divisions for the log."""
SLACK = 0.75
"""Factor by which a batch may be smaller than its level, or its inverse larger."""
WEIGHT = 0.5
"""Weight of the latest window in the rate of a division."""
MARGIN = 1.03
"""Factor by which the other division must be faster to replace the present one."""


@dataclass
class _Level:
    """Measurements and decision for batch sizes of one binary order of magnitude."""

    least: int
    """Smallest batch size."""
    split: bool
    """The decision: whether the sidecar has cores of its own."""
    names: tuple[str, str]
    """Names of the divisions, the one with cores of the sidecar's own first."""
    trial: bool = False
    """Whether the other division is being tried."""
    rates: dict[bool, float] = field(default_factory=dict)
    """Output tokens per second by division: moving averages over windows."""
    gap: int = 0
    """Number of windows before the next trial; FIRST_GAP at first."""
    windows: int = 0
    """Number of windows since the last trial."""
    seconds: float = 0.0
    """Time of the passes in the present window."""
    tokens: int = 0
    """Output tokens in the present window."""
    drafted: int = 0
    """Those that the sidecar drafted."""

    def __post_init__(self) -> None:
        self.gap = FIRST_GAP[self.split]

    @property
    def measured(self) -> bool:
        """Whether the decision follows from measurements of both divisions."""
        return len(self.rates) == 2

    @property
    def is_over(self) -> bool:
        """Whether the present window ends now: it is full, or a trial is clearly slower."""
        if self.seconds >= WINDOW_S:
            return True
        slower = self.trial and self.tokens < CLEAR * self.rates[self.split] * self.seconds
        return slower and self.seconds >= WINDOW_S / 3

    @property
    def wanted(self) -> bool:
        """The division of the present window."""
        return self.split != self.trial

    def conclude(self, *, hopeless: bool) -> None:
        """End a window, and with it a trial, or begin a trial unless it is `hopeless`."""
        rate = self.tokens / self.seconds
        before = self.rates.get(self.wanted, rate)
        self.rates[self.wanted] = before + WEIGHT * (rate - before)
        self.seconds, self.tokens, self.drafted = 0.0, 0, 0
        if not self.trial:
            self.windows += 1
            self.trial = self.windows >= self.gap and not hopeless
            return
        self.trial, self.windows = False, 0
        if self.rates[not self.split] > MARGIN * self.rates[self.split]:
            self.split = not self.split
            self.gap = FIRST_GAP[self.split]
            logger.info(
                "Batches of %d to %d requests: %s, for %.0f tokens/s instead of %.0f.",
                self.least,
                2 * self.least - 1,
                self.names[0 if self.split else 1],
                self.rates[self.split],
                self.rates[not self.split],
            )
        else:
            self.gap = min(4 * self.gap, LONGEST_GAP)


class CoreSplit:
    """Chooses between cores of the sidecar's own (True) and all cores for the target (False).

    On a shared device it chooses between drafts for running requests (True) and none (False).
    """

    def __init__(self, ratio: float, *, shared: bool = False) -> None:
        """`ratio` is the largest possible speedup of the target without the sidecar.

        With cores that is the number of all cores over the number without those of the sidecar. On
        a `shared` device there is no limit.
        """
        self._ratio = ratio
        self._names = SHARED if shared else DIVIDED
        self._few = math.inf if shared or ratio <= 1.0 else FEW / (ratio - 1.0)
        self._level = _Level(1, True, self._names)
        """The level of the present round."""
        self._levels = {1: self._level}
        self._split = True
        """The division of the present round."""
        self._since = math.inf
        """Seconds of decoding since the division changed."""

    def choose(self, requests: int) -> bool:
        """Whether the sidecar has cores of its own in the next round over `requests`."""
        # The level changes only if the batch is clearly smaller or larger.
        if not SLACK * self._level.least <= requests < 2 * self._level.least / SLACK:
            least = 1 << requests.bit_length() - 1
            if least not in self._levels:
                self._levels[least] = _Level(least, self._first(least), self._names)
            self._level = self._levels[least]
        wanted = self._level.wanted
        if wanted != self._split and self._since >= SETTLE_S:
            self._split, self._since = wanted, 0.0
        return self._split

    def _first(self, least: int) -> bool:
        """The division of batches from `least` requests on before any of them is measured.

        Drafts are worth more with fewer requests, so measured decisions of other levels tell.
        """
        measured = [level for level in self._levels.values() if level.measured]
        if any(not level.split for level in measured if level.least < least):
            return False
        return least < self._few or any(level.split for level in measured if level.least > least)

    def skip(self, seconds: float) -> None:
        """Record a decode pass that says nothing about the divisions."""
        self._since += seconds

    def observe(self, tokens: int, drafted: int, seconds: float, plain_rate: float) -> None:
        """Record a decode pass of the round for which `choose` was called last.

        The pass gave `tokens` output tokens in `seconds`; the sidecar drafted `drafted` of them.
        `plain_rate` is the predicted number of tokens per second without drafts, on the cores that
        the sidecar leaves.
        """
        self.skip(seconds)
        level = self._level
        if self._since < WARM_UP_S[self._split] or level.wanted != self._split:
            return
        level.seconds += seconds
        level.tokens += tokens
        level.drafted += drafted
        if not level.is_over:
            return
        # The target speeds up by the ratio at most, and only the sidecar's drafts go.
        without = self._ratio * max(plain_rate, (level.tokens - level.drafted) / level.seconds)
        hopeless = self._split and level.tokens / level.seconds > MARGIN * without
        level.conclude(hopeless=hopeless)
