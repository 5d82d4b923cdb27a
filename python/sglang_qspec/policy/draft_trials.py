"""Decides which drafts decode rounds use, by measured output tokens per second.

Pass times and acceptance rates predict what drafts are worth, and the other policies follow these
predictions. `DraftTrials` measures whether they hold. It now and then serves a moment in another
way, for example without any draft, and keeps the way that gives the most tokens per second. So it
also counts what no prediction knows: the work between two passes, the cores and the memory
bandwidth that a sidecar takes from its target. The pipelines of step drafts are such ways too.
While no request waits, a part of a token's worth is that it brings the end of the batch nearer
(`policy/last_requests.py`). Ways are compared by tokens per second, of which this part counts as
far as the last request gets.

Batches of one kind of answers and one binary order of magnitude share a decision. They begin with
what is known of other sizes of their kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sglang_qspec.policy.answer_kind import AnswerKind
from sglang_qspec.policy.forecast import Forecast
from sglang_qspec.policy.trial_level import DraftUse, TrialLevel

ALL, SEQUENTIAL, HALVES, TEXTS, NONE = DraftUse
WARM_UP_S = {ALL: 1.5, SEQUENTIAL: 0.5, HALVES: 0.5, TEXTS: 0.5, NONE: 0.25}
"""Seconds of decoding after a change that do not count, by the new use. All uses with step drafts
need those of ALL after a use without them."""
LONGEST_WARM_UP_S = 6.0
"""Those of ALL if no step draft comes earlier. A sidecar that gets its cores reads the texts of the
running requests first, and with large models that takes seconds."""
SETTLE_S = 0.25
"""Seconds of decoding after a change in which no other change comes; at most each warm-up."""
PATIENCE_S = 1.0
"""Seconds of decoding, after a batch has changed its order of magnitude, before the sidecar gets
the target's cores, unless new requests have come. At the end of a load batches shrink within a
second, and a sidecar that must read the running texts first would draft for none of them in
time."""
FEW = 4
"""Batch size below which the sidecar has cores of its own before anything is measured, if the
target doubles its cores without it. With a smaller ratio the limit is higher, because these cores
are worth less to the target."""
FALL = 0.18
"""Power of the batch size with which the worth of the sidecar's drafts falls, as is assumed without
a forecast. They are worth the target's cores below `FEW` requests, or what corresponds to it."""
MOST = 1.05
"""Largest factor that is assumed before any measurement: only the order counts."""
LOOKUPS = 1.02
"""Assumed rate with lookups over that of plain decoding."""
NEW, MOST_NEW = 0.01, 0.5
"""Weight of each request of the latest pass in what texts give, and largest weight of a pass."""
ROWS = 0.97
"""Assumed time of a plain pass over that of a pass with lookups, which has more rows."""
BOTH = 0.4
"""Share of what texts give that they also give beside step drafts, which find some of it too."""
UNPROVEN = 0.85
"""Factor on the predicted worth of step drafts that were not measured. Where they lose in spite of
a forecast, a short load loses more than it can gain, so they must be clearly worth it."""
FORECAST_EVERY = 4
"""Rounds between two forecasts for a batch size before it is measured; each takes some 2 ms."""
PROMISE_EVERY = 4
"""Rounds without drafts of which one asks whether drafts would have been right."""
SLACK = 0.75
"""Factor by which a batch may be smaller than its level, or its inverse larger."""


class DraftTrials:
    """Chooses the `DraftUse` of each decode round."""

    def __init__(
        self,
        ratio: float | None = None,
        forecast: Callable[[int], Forecast | None] = lambda _requests: None,
    ) -> None:
        """`ratio` is the largest possible speedup of the target without the sidecar beside it.

        With cores that is the number of all cores over the number without those of the sidecar, and
        infinity on another device that both share. None if the sidecar takes nothing from the
        target; then it drafts in all rounds, and only plain decoding is tried. `forecast` predicts
        what step drafts are worth for a number of requests, at the pace for which passes are
        recorded; None while that is not known.
        """
        self._forecast = forecast
        self._ratio = ratio
        self._few = math.inf
        if ratio is not None and 1.0 < ratio < math.inf:
            self._few = FEW / (ratio - 1.0)
        self._uses = [use for use in DraftUse if use is not TEXTS or ratio is not None]
        self._warm_up_s = dict(WARM_UP_S)
        """Seconds of the latest warm-up of each use."""
        self._gains: dict[AnswerKind, float] = {}
        """Output tokens of a request in a pass without those that the sidecar drafted."""
        self._levels: dict[tuple[AnswerKind, int], TrialLevel] = {}
        self._weight = 0.0
        """Part of the tokens' worth that only those of the last requests have now."""
        self._level = self._enter(AnswerKind.MIXED, 1)
        """The level of the present round."""
        self._requests = 1
        """Batch size of the present round."""
        self._use = ALL
        """The use of the present round."""
        self._since = math.inf
        """Seconds of decoding since the use changed; infinite before any change."""
        self._warm_s = 0.0
        """Seconds of decoding after that change that do not count."""
        self._stay = 0.0
        """Seconds of decoding since the level changed; infinite after new requests."""
        self._cold_s: float | None = 0.0
        """Seconds without a step draft since the use came to have some; None after the first."""
        self._arrived = False
        """Whether new requests have come since the last round."""
        self._read_s = 0.0
        """Seconds of decoding with step drafts since then, in which the sidecar could read."""
        self._promise = False
        """What the latest round that asked for promised drafts was told."""
        self._unasked = 0
        """Rounds without drafts since the last round with drafts."""

    @property
    def tries(self) -> bool:
        """Whether the use of the present round is only tried."""
        return self._level.trial is not None

    def arrive(self) -> None:
        """Note that new requests come, so that the next round is not the end of a load."""
        self._arrived = True

    def choose(
        self,
        requests: int,
        *,
        kind: AnswerKind = AnswerKind.MIXED,
        plain: bool = True,
        proposed: DraftUse = ALL,
        promised: Callable[[], bool] = lambda: False,
        weight: float = 0.0,
        reading: float = 0.0,
        left: Callable[[], float] = lambda: math.inf,
        certainty: float = 0.0,
    ) -> DraftUse:
        """The drafts of the next round over `requests` of this kind.

        NONE only if `plain` rounds are allowed. `proposed` is the use with step drafts whose
        pipeline is predicted to be the fastest. `promised` says whether drafts from texts would
        have been right for most requests; it is asked in some of the rounds without drafts.
        `weight` is that of `LastRequests`. A sidecar without the texts of the batch would read for
        `reading` seconds before it drafts. `left` is the expected time in seconds until the batch
        ends, and `certainty` the probability that no other request comes before.
        """
        self._requests, self._weight = requests, weight
        # The level changes only if the batch is of another kind, or clearly smaller or larger.
        near = SLACK * self._level.least <= requests < 2 * self._level.least / SLACK
        if kind is not self._level.kind or not near:
            self._level = self._enter(kind, 1 << requests.bit_length() - 1)
            self._stay = 0.0
        if self._arrived:
            self._stay, self._arrived, self._read_s = math.inf, False, 0.0
        if TEXTS in self._uses and not self._level.measured and self._level.use is ALL:
            if self._level.unmeasured % FORECAST_EVERY == 0:
                self._level.begin(self._assumed(self._level.kind, self._level.least))
            self._level.unmeasured += 1
        self._level.weight, self._level.reading, self._level.left = weight, reading, left
        self._level.allow(plain=plain, proposed=proposed, promised=self._promised(promised))
        wanted = self._in_time(self._level.wanted, reading - self._read_s, certainty)
        begins_steps = wanted.has_steps and not self._use.has_steps
        takes_cores = begins_steps and self._ratio is not None
        settled = self._since >= SETTLE_S and not (takes_cores and self._stay < PATIENCE_S)
        if wanted is not self._use and settled:
            self._use, self._since = wanted, 0.0
            self._cold_s = 0.0 if begins_steps else None
            self._warm_s = WARM_UP_S[ALL if begins_steps else wanted]
        return self._use

    def _in_time(self, wanted: DraftUse, unread: float, certainty: float) -> DraftUse:
        """`wanted`, or the best use without steps if the batch ends before step drafts have paid.

        The sidecar has to read for `unread` seconds first. `TrialLevel` sees to that before trials.
        """
        level = self._level
        if self._ratio is None or level.trial is not None or not wanted.has_steps or unread <= 0.0:
            return wanted
        horizon = level.left() / certainty if certainty else math.inf
        if horizon == math.inf:
            return wanted
        if level.cold is None and (found := self._forecast(level.least)) is not None:
            level.cold = found.cold
        rates = level.rates
        others = {use: rates[use] for use in self._uses if not use.has_steps}
        if not level.plain:
            others.pop(NONE)
        best = max(others, key=others.__getitem__)
        cold = rates[wanted] if level.cold is None else min(level.cold, rates[wanted])
        reads = min(unread, horizon)
        in_time = cold * reads + rates[wanted] * (horizon - reads) >= others[best] * horizon
        return wanted if in_time else best

    def _promised(self, promised: Callable[[], bool]) -> bool:
        """Whether drafts would have been right, by the latest round that asked."""
        if self._use is not NONE:
            self._promise, self._unasked = False, 0
            return False
        if self._unasked % PROMISE_EVERY == 0:
            self._promise = promised()
        self._unasked += 1
        return self._promise

    def _enter(self, kind: AnswerKind, least: int) -> TrialLevel:
        """The level of a kind of batches from `least` requests on."""
        level = self._levels.get((kind, least))
        if level is None:
            assumed = self._assumed(kind, least)
            level = TrialLevel(kind, least, self._uses, self._warm_up_s, assumed)
            self._levels[kind, least] = level
        elif not level.measured and not level.passes:
            level.begin(self._assumed(kind, least))
        return level

    def _assumed(self, kind: AnswerKind, least: int) -> dict[DraftUse, float]:
        """Rates of the uses in proportion to each other, before a level is measured.

        They follow the nearest level of the same kind that is measured, and the forecast of how the
        worth of step drafts differs between the two sizes. Before any measurement they follow the
        forecast, and what texts have given answers of this kind so far. Without a forecast the
        sidecar's drafts are assumed to pay up to `FEW` requests.
        """
        measured = [
            level
            for (other, size), level in self._levels.items()
            if other is kind and size != least and len(level.measured) > 1
        ]
        if measured:
            near = min(measured, key=lambda lv: (abs(math.log2(lv.least / least)), lv.least))
            best = max(rate for use, rate in near.rates.items() if use.has_steps)
            fallen = best * self._fall(near.least, least)
            return {use: fallen if use.has_steps else rate for use, rate in near.rates.items()}
        found = self._forecast(least)
        if found is not None:
            return self._predicted(kind, found)
        drafts = min(MOST, (self._few / least) ** FALL)
        return dict.fromkeys(DraftUse, drafts) | {TEXTS: LOOKUPS, NONE: 1.0}

    def _fall(self, measured: int, least: int) -> float:
        """Worth of step drafts for batches of `least` requests over that for `measured` ones."""
        there, here = self._forecast(measured), self._forecast(least)
        if there is None or here is None:
            return (measured / least) ** FALL
        return (here.drafts / here.plain) / (there.drafts / there.plain)

    def skip(self, seconds: float) -> None:
        """Record a decode pass that says nothing about the uses."""
        self._since += seconds
        self._stay += seconds
        self._read_s += seconds * self._use.has_steps

    def observe(
        self,
        tokens: int,
        drafted: int,
        seconds: float,
        plain_rate: float,
        *,
        has_steps: bool = True,
        progress: float = 1.0,
    ) -> None:
        """Record a decode pass of the round for which `choose` was called last.

        The pass gave `tokens` output tokens in `seconds`; the sidecar drafted `drafted` of them.
        `plain_rate` is the predicted number of tokens per second without drafts, on the cores of
        this pass. `has_steps` says whether the pass verified step drafts. It brought the end
        of the last request nearer by `progress` tokens.
        """
        self.skip(seconds)
        level = self._level
        if self._use is not NONE:
            self._note_gain(level.kind, tokens - drafted)
        is_cold = self._warms_up(seconds, has_steps=has_steps)
        if is_cold or self._since < self._warm_s or level.wanted is not self._use:
            return
        level.observe(tokens, drafted, seconds, self._requests, progress)
        if level.is_over:
            level.assumed = self._assumed(level.kind, level.least)
            self._expect(level)
            level.conclude(self._most_texts(plain_rate))

    def _warms_up(self, seconds: float, *, has_steps: bool) -> bool:
        """Whether a pass of `seconds` belongs to the time before the sidecar's first step draft."""
        if not self._use.has_steps or self._ratio is None or self._cold_s is None:
            return False
        self._cold_s += seconds
        if has_steps or self._cold_s >= LONGEST_WARM_UP_S:
            self._warm_up_s[ALL] = max(WARM_UP_S[ALL], self._cold_s)
            self._cold_s = None
        return True

    def _note_gain(self, kind: AnswerKind, tokens: int) -> None:
        """Learn what texts give from a pass with drafts that gave `tokens` without steps."""
        before = self._gains.get(kind, 1.0)
        weight = min(NEW * self._requests, MOST_NEW)
        self._gains[kind] = before + weight * (tokens / self._requests - before)

    def _expect(self, level: TrialLevel) -> None:
        """Predict the rates of the uses for batches as in the present window, if they are known."""
        found = self._forecast(round(level.requests / level.passes))
        level.expected = {} if found is None else self._predicted(level.kind, found)
        level.cold = None if found is None else found.cold

    def _predicted(self, kind: AnswerKind, found: Forecast) -> dict[DraftUse, float]:
        """Predicted rates of the uses for answers of this kind."""
        gain = max(LOOKUPS, ROWS * self._gains.get(kind, 1.0)) - 1.0
        # Texts are right for some requests and not for others, so the last ones get little of it.
        texts = 1.0 + (1.0 - self._weight) * gain
        drafts = UNPROVEN * (found.drafts + BOTH * (texts - 1.0) * found.plain)
        return dict.fromkeys(DraftUse, drafts) | {TEXTS: texts * found.plain, NONE: found.plain}

    def _most_texts(self, plain_rate: float) -> float:
        """The most tokens per second that TEXTS can give; infinite where nothing tells.

        The target speeds up by the ratio at most, and only the sidecar's drafts go.
        """
        level = self._level
        if not self._use.has_steps or self._ratio is None:
            return math.inf
        others = (level.window.tokens - level.drafted) / level.window.seconds
        return self._ratio * max(plain_rate, others)

    def describe(self) -> list[dict[str, Any]]:
        """The levels that have measurements, for /server_info."""
        levels = sorted(self._levels.values(), key=lambda level: (level.kind.value, level.least))
        return [level.describe() for level in levels if level.measured]
