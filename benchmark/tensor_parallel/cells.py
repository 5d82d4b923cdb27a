"""The cells and the servers of `bench_tensor_parallel`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.rounds import in_turn
from benchmark.harness.server import Server

NONE, QSPEC = "none", "qspec"
CONFIGS = (NONE, QSPEC)


@dataclass(frozen=True)
class Cell:
    """A configuration whose ranks exchange data with some added delay."""

    round: int
    """From 1."""
    delay_ms: float
    config: str

    def __str__(self) -> str:
        return f"round {self.round}, {self.delay_ms:g} ms, {self.config}"


def cells_of(delays: Sequence[float], rounds: int) -> list[Cell]:
    """All cells; every second round has the reverse order."""
    first = [Cell(1, delay, config) for delay in delays for config in CONFIGS]
    return in_turn(first, rounds)


@dataclass(frozen=True)
class LinkedConfiguration(Configuration):
    """A server of several ranks with the plugin that slows them."""

    environment: tuple[tuple[str, str], ...] = ()

    def server(
        self,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> Server:
        """A server that is not started yet."""
        return super().server({**dict(self.environment), **(environment or {})}, launcher)


def configuration(
    cell: Cell, settings: Settings, ranks: int, environment: Mapping[str, str]
) -> Configuration:
    """The configuration of a cell; on a CPU the ranks share the CPUs evenly."""
    own = dict(environment)
    if not settings.on_gpu:
        cpus = sorted(os.sched_getaffinity(0))
        groups = [cpus[rank % len(cpus) :: ranks] for rank in range(ranks)]
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, one)) for one in groups)
    flags: tuple[str, ...] = ("--tp-size", str(ranks))
    if cell.config == QSPEC:
        flags = replace(settings, sidecar_cores=()).qspec(*flags)
    return LinkedConfiguration(cell.config, settings, flags, environment=tuple(own.items()))
