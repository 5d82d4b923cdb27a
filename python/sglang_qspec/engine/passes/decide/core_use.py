"""Decides which drafts each decode round uses, and takes the CPUs for it.

The rounds use drafts only while these give more tokens per second than plain decoding does, as
measured (`policy.DraftTrials`).

`engine.placement.core_division` has chosen the CPUs of a server's own sidecar at the start. While
its drafts pay, decode passes leave these CPUs to the sidecar. Passes over long prompts always take
all CPUs: they are bound by arithmetic, and the drafts are not needed before their end. The sidecar
rests while the target has all CPUs. On a device
that target and sidecar share, the sidecar drafts for running requests only while its drafts are
worth what they cost the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from sglang_qspec.config import PIPELINES
from sglang_qspec.draft_source import OF_SIDECAR, OF_STEPS
from sglang_qspec.engine.passes.decide import batch_end
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.engine.placement.target_cores import TargetCores
from sglang_qspec.policy import AnswerKind, DraftTrials, DraftUse, PassTimes
from sglang_qspec.policy.forecast import Forecast, forecast
from sglang_qspec.policy.pace import Pace
from sglang_qspec.policy.pass_times import ALONE
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees
from sglang_qspec.values import parse_cores

if TYPE_CHECKING:
    from sglang_qspec.engine.speculator import Speculator

ABSENT_S = 20.0
"""Decoding time, in seconds, for which a sidecar that is not connected has its CPUs, whatever the
batch size. A sidecar needs some ten seconds to start, and longer on CPUs that the target uses."""
STOPPED = 5.0
"""Time of a pass over its predicted time from which on something else has stopped it, such as the
host of a virtual machine."""
LONG = 32
"""Number of prompt tokens from which a prefill takes all CPUs."""


class CoreUse:
    """Decides the drafts of each round, and divides the CPUs or the time of a shared device."""

    def __init__(self, placed: Placement | None, times: PassTimes, speculator: Speculator) -> None:
        self._times = times
        self._speculator = speculator
        self._cores: TargetCores | None = None
        self._shares = False
        """Whether the sidecar takes CPUs, or time of a shared device, from the target."""
        self._measured: DraftTrials | None = None
        """The trials for which the present round is measured; None for none."""
        self._use = DraftUse.ALL
        """The drafts of the present round."""
        self._pace = Pace()
        """The machine's pace, by the passes that the trials count."""
        self._absent_s = 0.0
        """Seconds of decoding for which a sidecar that is not connected has kept its CPUs."""
        ratio: float | None = None
        if placed is not None and (placed.shared or placed.shares_cpus):
            ratio = math.inf
        if placed is not None and placed.cores:
            self._cores = TargetCores(parse_cores(placed.cores))
            ratio = self._cores.ratio
        elif placed is not None and placed.left:
            self._cores = TargetCores(parse_cores(placed.left))
            speculator.totals.target_cpus = self._cores.use(everything=False)
        self._shares = ratio is not None
        self._ratio = ratio
        self._settings: RuntimeSettings | None = None
        """The settings of the present round."""
        self._trials = DraftTrials(ratio, self._forecast)
        self._alone = DraftTrials()
        """The trials of rounds in which the sidecar cannot draft, so that ALL stands for TEXTS."""
        speculator.totals.trials = self._trials

    def enter(
        self,
        requests: int,
        settings: RuntimeSettings,
        kind: AnswerKind = AnswerKind.MIXED,
        proposed: DraftUse = DraftUse.ALL,
        promised: Callable[[], bool] = lambda: False,
        texts: int = 0,
        *,
        room: bool = True,
    ) -> DraftUse:
        """Take the CPUs for a decode round over a batch of this `kind`; return the drafts it uses.

        With a fixed pipeline of step drafts in `settings` the sidecar always drafts. The drafts are
        predicted to be worth most in the pipeline of the use that is `proposed`; `promised` is that
        of `DraftTrials.choose`. `texts` is the number of tokens that a sidecar would have to read
        before it drafts for the batch. Without `room` for drafts in a pass, the target takes all
        CPUs, and the round is not measured.
        """
        sidecar = self._speculator.sidecar
        self._settings = settings
        self._speculator.totals.kind = kind
        if sidecar.ready:
            self._absent_s = 0.0
        drafts = settings.enabled and (
            not self._shares or (sidecar.wanted and (sidecar.ready or self._waits))
        )
        self._measured = self._trials_of(settings, drafts=drafts) if room else None
        self._use = DraftUse.ALL if room else DraftUse.NONE
        if self._measured is not None:
            self._speculator.totals.trials = self._measured
            self._use = self._measured.choose(
                requests,
                kind=kind,
                plain=not settings.fixed_width,
                proposed=proposed if drafts else DraftUse.ALL,
                promised=promised,
                weight=batch_end.weight(self._speculator, self._times, requests),
                reading=sidecar.read_seconds * texts,
                left=partial(batch_end.seconds_left, self._speculator, self._times, requests),
                certainty=self._speculator.last_requests.certainty,
            )
        if self._use.has_steps and not drafts:
            self._use = DraftUse.TEXTS
        everything = not self._use.has_steps
        if self._shares and self._cores is not None:
            sidecar.starve(everything)
            cpus = self._cores.use(everything=everything)
            self._times.enter_cores(cpus)
            self._speculator.totals.target_cpus = cpus
        elif self._shares:
            self._times.enter_cores(ALONE if everything else 0)
            return self._use if drafts or self._use is DraftUse.NONE else DraftUse.ALL
        return self._use

    def _trials_of(self, settings: RuntimeSettings, *, drafts: bool) -> DraftTrials | None:
        """The trials that decide a round; `drafts` says whether the sidecar may draft in it."""
        if not settings.enabled or settings.mode in PIPELINES:
            return None
        if not drafts:
            return self._alone
        return self._trials if self._speculator.sidecar.ready or not self._shares else None

    def _forecast(self, requests: int) -> Forecast | None:
        """What step drafts are worth for a batch, as the times of passes and steps predict it.

        The rates are those of the machine's usual pace.
        """
        if self._settings is None or self._ratio is None:
            return None
        settings, step_times = self._settings, self._speculator.sidecar.step_times
        if not step_times:
            return None
        own, everything = (0, ALONE) if self._cores is None else self._cores.counts
        times = self._times
        beside, alone = times.on(own, requests), times.on(everything, requests)
        if beside is None and alone is None:
            alone = times.on(everything)
            beside = times.on(own) if alone is None else None
        known = alone or beside
        if known is None:
            return None
        slower = 1.0
        if self._cores is None:  # a pass and its drafts take turns, each with the whole device
            beside = known
        else:  # more cores are never worth more than their number, and often much less
            slower = math.sqrt(self._ratio)
        found = forecast(
            requests,
            verify_seconds=beside or (lambda bs, width: slower * known(bs, width)),
            plain_seconds=alone(requests, 1) if alone else known(requests, 1) / slower,
            step_times=step_times,
            agreement=self._speculator.totals.agreement,
            widest=settings.draft_token_num,
            lookahead=settings.step_tokens,
            shares_device=self._cores is None,
            read_seconds=self._speculator.sidecar.read_seconds
            * self._speculator.totals.lengths.prompt_tokens_per_output_token,
        )
        pace = self._pace.now
        return Forecast(pace * found.drafts, pace * found.plain, pace * found.cold)

    @property
    def keeps_drafting(self) -> bool:
        """Whether the sidecar goes on during a round without drafts, which is only a trial."""
        measured = self._measured
        tries_none = self._use is DraftUse.NONE and measured is not None and measured.tries
        return tries_none and not self._shares

    @property
    def _waits(self) -> bool:
        """Whether a sidecar that is not connected keeps its CPUs, so that it can connect."""
        may_come = self._speculator.sidecar.may_come
        return self._cores is not None and may_come and self._absent_s < ABSENT_S

    def leave(self) -> None:
        """Give the target all CPUs for good, because speculation has ended."""
        cores, self._cores, self._shares = self._cores, None, False
        if cores is not None:
            self._speculator.totals.target_cpus = cores.use(everything=True)

    def enter_prefill(self, tokens: int) -> None:
        """Take the CPUs for a pass over this number of prompt tokens, of new requests."""
        self._trials.arrive()
        if self._cores is not None and self._shares:
            everything = tokens >= LONG or self._cores.has_all
            self._speculator.sidecar.starve(everything)
            self._cores.use(everything=everything)

    def observe(
        self,
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        tokens: int,
        seconds: float,
        progress: int = 1,
    ) -> None:
        """Record a decode pass that gave `tokens` output tokens; `accepted` as in `record`.

        `progress` is that of the last request (`batch_end.progress`). A pass that takes much longer
        than others of its size was stopped by something else, and says nothing about drafts. The
        trials count seconds of the machine's usual pace, so that uses which were measured at
        different moments can be compared on a machine that is slower at times.
        """
        if self._measured is None:
            self._trials.skip(seconds)
            if self._use is DraftUse.ALL:
                self._absent_s += seconds
            return
        drafted = 0
        if trees.width > 1:
            rows = [row for row, nodes in enumerate(accepted) for _ in nodes]
            sources = trees.sources[rows, list(chain(*accepted))]
            drafted = int(np.isin(sources, list(OF_SIDECAR)).sum())
        bs = len(accepted)
        if seconds > STOPPED * self._times.seconds(bs, trees.rows / bs):
            self._measured.skip(seconds)
            return
        self._pace.observe(self._use, (bs, round(2 * math.log2(trees.rows / bs))), seconds)
        pace = self._pace.now
        plain_rate = bs * pace / self._times.seconds(bs, 1)
        counts = trees.count_by_source() if trees.width > 1 else {}
        has_steps = any(counts.get(source) for source in OF_STEPS)
        self._measured.observe(
            tokens, drafted, seconds / pace, plain_rate, has_steps=has_steps, progress=progress
        )
        if self._shares and self._cores is None:
            self._speculator.totals.target_slowdown = self._times.slowdown(bs)

    def lost_seconds(self, seconds: float) -> float:
        """Seconds that the latest decode pass, of `seconds`, lost to a sidecar on its device."""
        slowdown = self._speculator.totals.target_slowdown
        if slowdown is None or not self._use.has_steps:
            return 0.0
        return max(0.0, seconds * (1.0 - 1.0 / slowdown))
