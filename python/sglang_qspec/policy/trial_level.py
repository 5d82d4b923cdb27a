"""The measurements that decide which drafts batches of one kind and of about one size use.

A trial serves a window of decoding in another way than the present decision. What was measured of
each way fades with the time of decoding, and the way with the most output tokens per second wins.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Any

from sglang_qspec.policy.answer_kind import AnswerKind

logger = logging.getLogger(__name__)


class DraftUse(Enum):
    """The drafts that the passes of a decode round verify."""

    ALL = "all"
    """All drafts, in the pipeline of the settings; for `auto` in `ahead`. The sidecar drafts for
    running requests, on cores of its own if there are any."""
    SEQUENTIAL = "sequential"
    """All drafts, in the pipeline `sequential`."""
    HALVES = "halves"
    """All drafts, in the pipeline `halves`."""
    TEXTS = "texts"
    """Those that need no sidecar beside the target: lookups, guesses, and completions from the time
    before the request was served. The target has all cores."""
    NONE = "none"
    """No drafts: plain decoding. The target has all cores."""

    @property
    def has_steps(self) -> bool:
        """Whether the sidecar drafts for running requests."""
        return self not in (DraftUse.TEXTS, DraftUse.NONE)

    @property
    def changes_pipeline(self) -> bool:
        """Whether the drafts are those of `ALL` in another pipeline."""
        return self in (DraftUse.SEQUENTIAL, DraftUse.HALVES)


ALL, SEQUENTIAL, HALVES, TEXTS, NONE = DraftUse
DESCRIPTION = {
    ALL: "all drafts",
    SEQUENTIAL: "all drafts in the pipeline sequential",
    HALVES: "all drafts in the pipeline halves",
    TEXTS: "only drafts that need no sidecar beside the target",
    NONE: "no drafts",
}
"""Each use, for the log."""
WINDOW_S = dict.fromkeys(DraftUse, 1.5) | {NONE: 0.5}
"""Seconds of decoding that are measured as a whole. Plain passes differ least."""
FEWEST = 8
"""Number of passes that a window has at least, however long they are."""
MEMORY_S = 30.0
"""Seconds of decoding in which measurements fade to 1/e, because texts change."""
KEPT_S = 1.5
"""Seconds of each use that do not fade: its last measurements count until it is tried again."""
FIRST_GAP, LONGEST_GAP = {ALL: 3, SEQUENTIAL: 2, HALVES: 2, TEXTS: 2, NONE: 3}, 64
"""Time between two trials of another use, in windows of that use: FIRST_GAP at first, then four
times the last gap, up to LONGEST_GAP. The shorter a trial, the sooner it comes."""
LOSS = 0.01
"""Share of the decoding time that the trials of one use may lose, by what is known of its rate."""
CLEAR = 0.85
"""Share of the present use's rate below which a third of a window ends a trial."""
MARGIN = 1.03
"""Factor by which another use must be faster to replace the present one."""
COMPARISONS = 8
"""Number of the latest comparisons with plain decoding that are shown."""


@dataclass
class Served:
    """What was decoded with one use; the latest windows count most."""

    tokens: float = 0.0
    """Output tokens."""
    last_tokens: float = 0.0
    """Output tokens if all requests of a pass had got as far as its last one."""
    seconds: float = 0.0
    """Their time."""

    def worth(self, weight: float) -> float:
        """What the tokens are worth, if this part of their worth is that of the last ones."""
        return (1.0 - weight) * self.tokens + weight * self.last_tokens

    def add(self, more: Served) -> None:
        """Add a window."""
        self.tokens += more.tokens
        self.last_tokens += more.last_tokens
        self.seconds += more.seconds

    def fade(self, seconds: float) -> None:
        """Let the measurements fade for these seconds of decoding."""
        if self.seconds > KEPT_S:
            share = max(math.exp(-seconds / MEMORY_S), KEPT_S / self.seconds)
            self.tokens, self.last_tokens = share * self.tokens, share * self.last_tokens
            self.seconds *= share


@dataclass
class TrialLevel:
    """Measurements and decision for batches of a kind, of one binary order of magnitude."""

    kind: AnswerKind
    least: int
    """Smallest batch size."""
    uses: Sequence[DraftUse]
    """All uses that are tried."""
    warm_up_s: Mapping[DraftUse, float]
    """Seconds of the latest warm-up of each use."""
    assumed: Mapping[DraftUse, float]
    """Rates of the uses in proportion to each other, as other levels or predictions tell them."""
    use: DraftUse = ALL
    """The decision."""
    trial: DraftUse | None = None
    """The use that is being tried in place of the decision."""
    plain: bool = True
    """Whether rounds without drafts are allowed now."""
    promised: bool = False
    """Whether the texts of most requests repeat what would have been drafted for them."""
    of_promise: bool = False
    """Whether the present trial came early because of a promise."""
    promise_gap: int = 1
    """Windows before the next trial of drafts from texts that are promised to be right."""
    proposed: DraftUse = ALL
    """The use with step drafts that is predicted to give the most tokens per second."""
    served: dict[DraftUse, Served] = field(
        default_factory=lambda: {use: Served() for use in DraftUse}
    )
    """The measurements of each use."""
    gaps: dict[DraftUse, int] = field(default_factory=lambda: dict(FIRST_GAP))
    """Windows before the next trial of each use."""
    since: dict[DraftUse, float] = field(default_factory=lambda: dict.fromkeys(DraftUse, 0.0))
    """Measured seconds since the last trial of each use."""
    last_rate: float = 0.0
    """Output tokens per second of the decision's last window."""
    over_none: deque[float] = field(default_factory=lambda: deque(maxlen=COMPARISONS))
    """Rates with drafts over rates without, of the latest comparisons."""
    pass_seconds: float = 0.0
    """Mean time of a pass in the last window of the decision."""
    unmeasured: int = 0
    """Rounds before the first window was measured."""
    weight: float = 0.0
    """Part of the worth of tokens that only those of the last requests have now."""
    reading: float = 0.0
    """Seconds that a sidecar without the texts of the batch would read before it drafts."""
    left: Callable[[], float] = lambda: math.inf
    """Expected time in seconds until the batch ends."""
    passes: int = 0
    """Number of passes in the present window."""
    window: Served = field(default_factory=Served)
    """What they decoded."""
    drafted: int = 0
    """Output tokens that the sidecar drafted."""
    requests: int = 0
    """Batch sizes, summed over its passes."""
    expected: Mapping[DraftUse, float] = field(default_factory=dict)
    """Predicted rates of the uses, where they are known."""
    cold: float | None = None
    """Predicted rate while the sidecar reads beside the target; None if it is not known."""

    def __post_init__(self) -> None:
        self.begin(self.assumed)

    def begin(self, assumed: Mapping[DraftUse, float]) -> None:
        """Decide by these `assumed` rates, before anything is measured."""
        self.assumed = assumed
        self.use = max(self.uses, key=self.assumed.__getitem__)

    @property
    def wanted(self) -> DraftUse:
        """The use of the present window."""
        return self.use if self.trial is None else self.trial

    def allow(self, *, plain: bool, proposed: DraftUse, promised: bool) -> None:
        """Allow rounds without drafts, or end them.

        `proposed` may be tried from now on, and drafts from texts soon if they are `promised`.
        """
        self.plain, self.proposed, self.promised = plain, proposed, promised
        if plain or self.wanted is not NONE:
            return
        self.trial = None
        if self.use is NONE:
            self.use = self._of_texts
        self._clear()

    @property
    def _of_texts(self) -> DraftUse:
        """The use of drafts from texts that takes least from the target."""
        return TEXTS if TEXTS in self.uses else ALL

    @property
    def measured(self) -> Sequence[DraftUse]:
        """The uses that have measurements."""
        return [use for use in self.uses if self.served[use].seconds > 0.0]

    @property
    def rates(self) -> dict[DraftUse, float]:
        """Output tokens per second of each use: measured, or assumed in proportion to these.

        They count by their worth. Without any measurement they are the assumed ones. A pipeline
        that was not measured is no faster than the first one: predictions of it only lead to a
        trial.
        """
        tokens = sum(self.served[use].worth(self.weight) for use in self.uses)
        expected = sum(self.assumed[use] * self.served[use].seconds for use in self.uses)
        scale = tokens / expected if expected else 1.0
        rates: dict[DraftUse, float] = {}
        for use in self.uses:
            served = self.served[use]
            if served.seconds:
                rates[use] = served.worth(self.weight) / served.seconds
            elif use.changes_pipeline:
                rates[use] = rates[ALL]
            else:
                rates[use] = self.expected.get(use, scale * self.assumed[use])
        return rates

    def observe(
        self, tokens: int, drafted: int, seconds: float, requests: int, progress: float
    ) -> None:
        """Record a pass of the present window, as `DraftTrials.observe` describes it."""
        self.requests += requests
        self.passes += 1
        self.window.add(Served(tokens, progress * requests, seconds))
        self.drafted += drafted

    @property
    def is_over(self) -> bool:
        """Whether the present window ends now: it is full, or a trial is clearly slower."""
        share = min(self.window.seconds / WINDOW_S[self.wanted], self.passes / FEWEST)
        if share >= 1.0 or self.trial is None:
            return share >= 1.0
        return share >= 1 / 3 and self._rate < CLEAR * self.rates[self.use]

    @property
    def _rate(self) -> float:
        """Output tokens per second of the present window, by their worth."""
        return self.window.worth(self.weight) / self.window.seconds

    def conclude(self, most_texts: float) -> None:
        """End a window, and with it a trial, or begin one.

        TEXTS give at most `most_texts` tokens per second.
        """
        rate, seconds = self._rate, self.window.seconds
        for each in self.served.values():
            each.fade(seconds)
        self.served[self.wanted].add(self.window)
        tried, self.trial = self.trial, None
        if tried is None:
            self.last_rate, self.pass_seconds = rate, seconds / self.passes
            for other in self.since:
                self.since[other] += seconds
        else:
            self.since[tried] = 0.0
            self._compare(tried, rate)
        rates = {use: each for use, each in self.rates.items() if self.plain or use is not NONE}
        best = max(rates, key=rates.__getitem__)
        if rates[best] > MARGIN * rates[self.use]:
            self._decide(best, rates)
        elif tried is not None:
            self.gaps[tried] = min(4 * self.gaps[tried], LONGEST_GAP)
            if self.of_promise:
                self.promise_gap = min(4 * self.promise_gap, LONGEST_GAP)
        else:
            self.trial = self._next_trial(rates, most_texts)
            self.of_promise = self._is_promised(self.trial)
        self._clear()

    def _clear(self) -> None:
        """Begin a window."""
        self.passes, self.drafted, self.requests, self.window = 0, 0, 0, Served()

    def _next_trial(self, rates: Mapping[DraftUse, float], most_texts: float) -> DraftUse | None:
        """The use to try in the next window, if one is due.

        Another pipeline is tried only while it is proposed, and after the first one. A sidecar is
        not tried if the batch would end before its drafts are measured.
        """
        known = self.served[ALL].seconds > 0.0
        due = {
            other: self.since[other] / self._gap(other, rates)
            for other in rates
            if other is not self.use
            and (not other.changes_pipeline or (known and other is self.proposed))
            and not (other is TEXTS and rates[self.use] > MARGIN * most_texts)  # it cannot win
            and not self._ends_before(other)
        }
        latest = max(due, key=due.__getitem__, default=None)
        return latest if latest is not None and due[latest] >= 1.0 else None

    def _ends_before(self, use: DraftUse) -> bool:
        """Whether the batch would end before a sidecar that begins now is measured."""
        begins_steps = use.has_steps and not self.use.has_steps
        return begins_steps and self.left() < self._cold_s(use) + WINDOW_S[use]

    def _cold_s(self, use: DraftUse) -> float:
        """Seconds from the start of a use to the first pass that counts."""
        warm_up = self.warm_up_s[use]
        return max(warm_up, self.reading) if use.has_steps else warm_up

    def _gap(self, other: DraftUse, rates: Mapping[DraftUse, float]) -> float:
        """Seconds before the next trial of a use, so that its trials lose at most `LOSS`.

        What was measured of drafts from other texts says nothing of those that are promised.
        """
        window = max(WINDOW_S[other], FEWEST * self.pass_seconds)
        if self._is_promised(other):
            return self.promise_gap * window
        slower = cold = max(0.0, 1.0 - rates[other] / rates[self.use])
        if other.has_steps and not self.use.has_steps and self.cold is not None:
            cold = max(slower, 1.0 - self.cold / rates[self.use])
        lost = cold * self._cold_s(other) + slower * window / 3
        return max(self.gaps[other] * window, lost / LOSS)

    def _is_promised(self, other: DraftUse | None) -> bool:
        """Whether a use in place of the present one has drafts that are promised to be right."""
        return self.promised and self.use is NONE and other is self._of_texts

    def _compare(self, tried: DraftUse, rate: float) -> None:
        """Note what drafts were worth, if they or plain decoding had a trial that gave `rate`."""
        if NONE in (tried, self.use) and min(rate, self.last_rate) > 0.0:
            ratio = rate / self.last_rate
            self.over_none.append(1.0 / ratio if tried is NONE else ratio)

    def _decide(self, use: DraftUse, rates: Mapping[DraftUse, float]) -> None:
        """Use these drafts from now on."""
        logger.info(
            "Batches of %d to %d requests (%s): %s, for %.0f tokens/s instead of %.0f.",
            self.least,
            2 * self.least - 1,
            self.kind.value,
            DESCRIPTION[use],
            rates[use],
            rates[self.use],
        )
        self.use, self.gaps, self.last_rate = use, dict(FIRST_GAP), rates[use]
        self.promise_gap = 1
        self.since = dict.fromkeys(DraftUse, 0.0)

    def describe(self) -> dict[str, Any]:
        """The level for /server_info."""
        ratios, rates = sorted(self.over_none), self.rates
        return {
            "kind": self.kind.value,
            "requests": [self.least, 2 * self.least - 1],
            "drafts": self.use.value,
            "tokens_per_s": {use.value: round(rates[use], 1) for use in self.measured},
            "over_none": round(median(ratios), 3) if ratios else None,
            "over_none_range": [round(ratio, 3) for ratio in (ratios[0], ratios[-1])]
            if ratios
            else None,
            "comparisons": len(ratios),
        }
