"""Takes the CPUs for each pass of a target that shares them with its own sidecar.

`engine.sidecar.core_division` has chosen the sidecar's CPUs at the start. While drafts pay, decode
passes leave these CPUs to the sidecar (`policy.CoreSplit`). Passes over long prompts always take
all CPUs: they are bound by arithmetic, and the drafts are not needed before their end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_qspec.config import Placement
from sglang_qspec.engine.cpu.target_cores import TargetCores
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.policy import CoreSplit, PassTimes
from sglang_qspec.trie import DraftTrees, Source
from sglang_qspec.values import parse_cores

LONG = 32
"""Number of prompt tokens from which a prefill takes all CPUs."""
DRAFTED = frozenset((Source.STEP, Source.QUEUE))
"""Draft sources that the sidecar provides."""


class CoreUse:
    """Divides the CPUs round by round, or does nothing if QSPEC does not divide them."""

    def __init__(self, placed: Placement | None, times: PassTimes, speculator: Speculator) -> None:
        self._times = times
        self._speculator = speculator
        self._cores: TargetCores | None = None
        self._split = CoreSplit(1.0)
        if placed is not None and placed.cores:
            self._cores = TargetCores(parse_cores(placed.cores))
            self._split = CoreSplit(self._cores.ratio)

    def enter(self, requests: int) -> bool:
        """Take the CPUs for a decode round; whether the sidecar has time to draft for it."""
        if self._cores is None:
            return True
        uses_sidecar = self._speculator.sidecar.ready and not (
            self._speculator.sources.paused >= DRAFTED
        )
        split = uses_sidecar and self._split.choose(requests)
        cpus = self._cores.use(everything=not split)
        self._times.enter_cores(cpus)
        self._speculator.totals.target_cpus = cpus
        return split

    def enter_prefill(self, tokens: int) -> None:
        """Take the CPUs for a pass over this number of prompt tokens."""
        if self._cores is not None and tokens >= LONG:
            self._cores.use(everything=True)

    def observe(
        self, trees: DraftTrees, accepted: Sequence[Sequence[int]], tokens: int, seconds: float
    ) -> None:
        """Record a decode pass that gave `tokens` output tokens; `accepted` as in `record`."""
        if self._cores is None:
            return
        drafted = sum(
            int(np.isin(trees.sources[row, list(nodes)], list(DRAFTED)).sum())
            for row, nodes in enumerate(accepted)
            if nodes
        )
        bs = len(accepted)
        plain_rate = bs / self._times.seconds(bs, 1)
        self._split.observe(tokens, drafted, seconds, plain_rate)
