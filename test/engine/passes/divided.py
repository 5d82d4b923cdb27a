"""A division of two CPUs between a target and its sidecar, for tests of `CoreUse`."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang_qspec.engine.passes.decide.core_use import CoreUse
from sglang_qspec.policy import LastRequests
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.policy.totals import Totals
from sglang_qspec.trie import DraftTree, DraftTrees, Source

REQUESTS = 2
RUNTIME = RuntimeSettings("auto", 8, 8, fixed_width=False)


class Sidecar(SimpleNamespace):
    """Sidecars of which only the state is known."""

    starved = False

    def starve(self, starved: bool) -> None:
        self.starved = starved


@dataclass
class Cores:
    """Two CPUs in place of the machine's; one is the sidecar's."""

    shared: frozenset[int]
    count: int = 2
    ratio: float = 2.0
    counts: tuple[int, int] = (1, 2)

    @property
    def has_all(self) -> bool:
        return self.count == 2

    def use(self, *, everything: bool) -> int:
        self.count = 2 if everything else 1
        return self.count


def speculator(*, ready: bool = True, wanted: bool = True) -> Any:
    """A speculator; `wanted` says whether any request asks for drafts of its sidecar."""
    sidecar = Sidecar(
        ready=ready,
        wanted=wanted,
        may_come=False,
        step_times=[],
        read_seconds=0.0,
    )
    ends = LastRequests()
    return SimpleNamespace(totals=Totals(), sidecar=sidecar, others_wait=True, last_requests=ends)


def count(use: CoreUse) -> int:
    cores: Any = use._cores
    found: int = cores.count
    return found


def trees_of(source: Source) -> DraftTrees:
    tree = DraftTree((5, 6, 7, 8), (0, 0, 1, 2), (source,) * 4, (1.0, 0.9, 0.9, 0.9))
    return DraftTrees.of([tree] * REQUESTS, 4)
