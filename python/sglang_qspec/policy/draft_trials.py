"""Decides which drafts decode rounds use, by measured output tokens per second.

Pass times and acceptance rates predict what drafts are worth, and the other policies follow these
predictions. `DraftTrials` measures whether they hold. It now and then serves a moment in another
way, for example without any draft, and keeps the way that gives the most tokens per second. So it
also counts what no prediction knows: the work between two passes, the cores and the memory
bandwidth that a sidecar takes from its target.

Batches of one binary order of magnitude share a decision, and begin with that of smaller or larger
batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sglang_qspec.policy.forecast import Forecast
from sglang_qspec.policy.trial_level import CLEAR, DraftUse, TrialLevel

ALL, TEXTS, NONE = DraftUse
WARM_UP_S = {ALL: 1.5, TEXTS: 0.5, NONE: 0.25}
"""Seconds of decoding after a change that do not count, by the new use."""
LONGEST_WARM_UP_S = 6.0
"""Those of ALL if no step draft comes earlier. A sidecar that gets its cores reads the texts of the
running requests first, and with large models that takes seconds."""
SETTLE_S = 0.25
"""Seconds of decoding after a change in which no other change comes; at most each warm-up."""
PATIENCE_S = 1.0
"""Seconds of decoding at one order of magnitude before the sidecar gets the target's cores. At the
end of a load batches shrink within a second, and a sidecar that must read the running texts first
would draft for none of them in time."""
FEW = 4
"""Batch size below which the sidecar has cores of its own before anything is measured, if the
target doubles its cores without it. With a smaller ratio the limit is higher, because these cores
are worth less to the target."""
FORECAST_EVERY = 4
"""Rounds between two forecasts for a batch size before it is measured; each takes some 2 ms."""
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
        what step drafts are worth for a number of requests; None while that is not known.
        """
        self._forecast = forecast
        self._ratio = ratio
        self._few = math.inf
        if ratio is not None and 1.0 < ratio < math.inf:
            self._few = FEW / (ratio - 1.0)
        self._uses = (ALL, NONE) if ratio is None else (ALL, TEXTS, NONE)
        self._warm_up_s = dict(WARM_UP_S)
        """Seconds of the latest warm-up of each use."""
        self._levels: dict[int, TrialLevel] = {}
        self._level = self._enter(1)
        """The level of the present round."""
        self._requests = 1
        """Batch size of the present round."""
        self._use = ALL
        """The use of the present round."""
        self._since = math.inf
        """Seconds of decoding since the use changed; infinite before any change."""
        self._stay = 0.0
        """Seconds of decoding since the level changed."""
        self._cold_s: float | None = 0.0
        """Seconds for which ALL has been used without a step draft; None after the first one."""

    @property
    def tries(self) -> bool:
        """Whether the use of the present round is only tried."""
        return self._level.trial is not None

    def choose(self, requests: int, *, plain: bool = True) -> DraftUse:
        """The drafts of the next round over `requests`; NONE only if `plain` rounds are allowed."""
        # The level changes only if the batch is clearly smaller or larger.
        if not SLACK * self._level.least <= requests < 2 * self._level.least / SLACK:
            self._level, self._stay = self._enter(1 << requests.bit_length() - 1), 0.0
        self._requests = requests
        if TEXTS in self._uses and not self._level.rates and self._level.use is ALL:
            if self._level.unmeasured % FORECAST_EVERY == 0:
                self._spare()
            self._level.unmeasured += 1
        self._level.allow(plain=plain)
        wanted = self._level.wanted
        takes_cores = wanted is ALL and self._ratio is not None
        settled = self._since >= SETTLE_S and not (takes_cores and self._stay < PATIENCE_S)
        if wanted is not self._use and settled:
            self._use, self._since, self._cold_s = wanted, 0.0, 0.0
        return self._use

    def _spare(self) -> None:
        """Leave the target its cores, if the sidecar's drafts are clearly worth less to it.

        They are measured later, when a trial of them loses little.
        """
        found = self._forecast(self._requests)
        if found is not None and found.drafts < CLEAR * found.plain:
            self._level.use = TEXTS

    def _enter(self, least: int) -> TrialLevel:
        if least not in self._levels:
            self._levels[least] = TrialLevel(least, self._first(least), self._uses, self._warm_up_s)
        return self._levels[least]

    def _first(self, least: int) -> DraftUse:
        """The use of batches from `least` requests on before any of them is measured.

        Drafts are worth more with fewer requests, so measured decisions of other levels tell.
        """
        measured = sorted(
            (level for level in self._levels.values() if level.measured), key=lambda lv: lv.least
        )
        smaller = [level.use for level in measured if level.least < least]
        if smaller and smaller[-1] is not ALL:
            return smaller[-1]
        larger = [level.use for level in measured if level.least > least]
        return ALL if least < self._few or ALL in larger else TEXTS

    def skip(self, seconds: float) -> None:
        """Record a decode pass that says nothing about the uses."""
        self._since += seconds
        self._stay += seconds

    def observe(
        self,
        tokens: int,
        drafted: int,
        seconds: float,
        plain_rate: float,
        *,
        has_steps: bool = True,
    ) -> None:
        """Record a decode pass of the round for which `choose` was called last.

        The pass gave `tokens` output tokens in `seconds`; the sidecar drafted `drafted` of them.
        `plain_rate` is the predicted number of tokens per second without drafts, on the cores of
        this pass. `has_steps` says whether the pass verified step drafts.
        """
        self.skip(seconds)
        level = self._level
        is_cold = self._warms_up(seconds, has_steps=has_steps)
        if is_cold or self._since < WARM_UP_S[self._use] or level.wanted is not self._use:
            return
        level.passes += 1
        level.seconds += seconds
        level.tokens += tokens
        level.drafted += drafted
        if level.is_over:
            level.conclude(self._predicted(plain_rate))

    def _warms_up(self, seconds: float, *, has_steps: bool) -> bool:
        """Whether a pass of `seconds` belongs to the time before the sidecar's first step draft."""
        if self._use is not ALL or self._ratio is None or self._cold_s is None:
            return False
        self._cold_s += seconds
        if has_steps or self._cold_s >= LONGEST_WARM_UP_S:
            self._warm_up_s[ALL] = max(WARM_UP_S[ALL], self._cold_s)
            self._cold_s = None
        return True

    def _predicted(self, plain_rate: float) -> dict[DraftUse, float]:
        """Predicted tokens per second of other uses; that of TEXTS is an upper limit."""
        level = self._level
        ratio = self._ratio if self._ratio is not None and self._use is ALL else 1.0
        others = (level.tokens - level.drafted) / level.seconds
        predicted = {NONE: ratio * plain_rate}
        if self._use is ALL:
            # The target speeds up by the ratio at most, and only the sidecar's drafts go.
            predicted[TEXTS] = ratio * max(plain_rate, others)
        elif (found := self._forecast(self._requests)) is not None:
            predicted[ALL] = found.drafts
        return predicted

    def describe(self) -> list[dict[str, Any]]:
        """The levels that have measurements, for /server_info."""
        return [level.describe() for _, level in sorted(self._levels.items()) if level.rates]
