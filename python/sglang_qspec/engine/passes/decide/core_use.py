"""Takes the CPUs for each pass of a target that shares them with its own sidecar.

`engine.placement.core_division` has chosen the sidecar's CPUs at the start. While drafts pay,
decode passes leave these CPUs to the sidecar (`policy.CoreSplit`). Passes over long prompts always
take all CPUs: they are bound by arithmetic, and the drafts are not needed before their end.

On a device that target and sidecar share, the same policy decides whether the sidecar drafts for
running requests at all: its drafts must be worth what they cost the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang_qspec.config import PIPELINES
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.engine.placement.target_cores import TargetCores
from sglang_qspec.policy import CoreSplit, PassTimes
from sglang_qspec.policy.pass_times import ALONE
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees, Source
from sglang_qspec.values import parse_cores

if TYPE_CHECKING:
    from sglang_qspec.engine.speculator import Speculator

ABSENT_S = 20.0
"""Decoding time, in seconds, for which a sidecar that is not connected has its CPUs, whatever the
batch size. A sidecar needs some ten seconds to start, and longer on CPUs that the target uses."""
LONG = 32
"""Number of prompt tokens from which a prefill takes all CPUs."""
DRAFTED = frozenset((Source.STEP, Source.QUEUE))
"""Draft sources that the sidecar provides."""


class CoreUse:
    """Divides the CPUs or the time of a shared device round by round.

    It does nothing if the sidecar has a device or CPUs of its own in every round.
    """

    def __init__(self, placed: Placement | None, times: PassTimes, speculator: Speculator) -> None:
        self._times = times
        self._speculator = speculator
        self._cores: TargetCores | None = None
        self._split: CoreSplit | None = None
        self._decides = False
        """Whether the present round is measured for `_split`."""
        self._drafts = False
        """Whether the sidecar drafts for running requests in the present round."""
        self._absent_s = 0.0
        """Seconds of decoding for which a sidecar that is not connected has kept its CPUs."""
        if placed is not None and (placed.shared or placed.shares_cpus):
            self._split = CoreSplit(math.inf, shared=True)
        if placed is not None and placed.cores:
            self._cores = TargetCores(parse_cores(placed.cores))
            self._split = CoreSplit(self._cores.ratio)
        elif placed is not None and placed.left:
            self._cores = TargetCores(parse_cores(placed.left))
            speculator.totals.target_cpus = self._cores.use(everything=False)

    def enter(self, requests: int, settings: RuntimeSettings) -> bool:
        """Take the CPUs for a decode round; whether the sidecar has time to draft for it.

        With a fixed pipeline of step drafts in `settings` it always has.
        """
        if self._split is None:
            return True
        sidecar = self._speculator.sidecar
        if sidecar.ready:
            self._absent_s = 0.0
        uses_sidecar = settings.enabled and sidecar.wanted and (sidecar.ready or self._waits)
        self._decides = uses_sidecar and sidecar.ready and settings.mode not in PIPELINES
        split = self._split.choose(requests) if self._decides else uses_sidecar
        self._drafts = split
        if self._cores is None:
            self._times.enter_cores(0 if split else ALONE)
            return split or not uses_sidecar
        sidecar.starved = not split
        cpus = self._cores.use(everything=not split)
        self._times.enter_cores(cpus)
        self._speculator.totals.target_cpus = cpus
        return split

    @property
    def _waits(self) -> bool:
        """Whether a sidecar that is not connected keeps its CPUs, so that it can connect."""
        may_come = self._speculator.sidecar.may_come
        return self._cores is not None and may_come and self._absent_s < ABSENT_S

    def leave(self) -> None:
        """Give the target all CPUs for good, because speculation has ended."""
        cores, self._cores, self._split = self._cores, None, None
        if cores is not None:
            self._speculator.totals.target_cpus = cores.use(everything=True)

    def enter_prefill(self, tokens: int) -> None:
        """Take the CPUs for a pass over this number of prompt tokens."""
        if self._cores is not None and self._split is not None and tokens >= LONG:
            self._cores.use(everything=True)

    def observe(
        self, trees: DraftTrees, accepted: Sequence[Sequence[int]], tokens: int, seconds: float
    ) -> None:
        """Record a decode pass that gave `tokens` output tokens; `accepted` as in `record`."""
        if self._split is None:
            return
        if not self._decides:
            self._split.skip(seconds)
            if self._drafts:
                self._absent_s += seconds
            return
        drafted = sum(
            int(np.isin(trees.sources[row, list(nodes)], list(DRAFTED)).sum())
            for row, nodes in enumerate(accepted)
            if nodes
        )
        bs = len(accepted)
        plain_rate = bs / self._times.seconds(bs, 1)
        self._split.observe(tokens, drafted, seconds, plain_rate)
        if self._cores is None:
            self._speculator.totals.target_slowdown = self._times.slowdown(bs)

    def lost_seconds(self, seconds: float) -> float:
        """Seconds that the latest decode pass, of `seconds`, lost to a sidecar on its device."""
        slowdown = self._speculator.totals.target_slowdown
        if slowdown is None or not self._drafts:
            return 0.0
        return max(0.0, seconds * (1.0 - 1.0 / slowdown))
