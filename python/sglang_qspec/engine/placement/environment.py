"""Where the processes of a server run: its own sidecar, and the CPUs of the target's ranks.

The process that reads the arguments decides it. The other processes of the server read the decision
from the environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_qspec.config import PLACEMENT_VARIABLE, cpu_engine

_RANK_CPUS = "SGLANG_CPU_OMP_THREADS_BIND"
_placed: str | None = None
"""The CPUs that `place_ranks` has set in this process; None if it has set none."""


@dataclass(frozen=True)
class Placement:
    """Where a server's own sidecar runs."""

    device: str
    """`cpu` or `cuda:N`, numbered among the GPUs that the server sees."""
    shared: bool = False
    """Whether the target runs on the same GPU."""
    mem_fraction: float = 0.0
    """Fraction of the device's memory for the sidecar; 0 means all free memory."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of the process that chose `device` (`config.visible_gpus`); None if it
    is not set. SGLang may change the variable in scheduler processes."""
    cores: str = ""
    """CPUs that the server gives to the sidecar while that pays; empty if it does not decide."""
    pinned: str = ""
    """CPUs that the server gives to the sidecar for all time, because it cannot divide them."""
    left: str = ""
    """CPUs that the target leaves for all time to a sidecar that the user has pinned to them."""
    shares_cpus: bool = False
    """Whether target and sidecar use the same CPUs, without a division by the server."""
    endpoint: str = ""
    """Address of the sidecar that all schedulers of the server share; empty if there is one
    scheduler, which chooses the address itself."""

    @property
    def may_fork(self) -> bool:
        """Whether the sidecar may be a fork of a process of the server: neither uses a GPU."""
        return self.device == "cpu" and cpu_engine()


def write(placement: Placement | None) -> None:
    """Write the placement to this process's environment, for its subprocesses; None removes it."""
    if placement is None:
        os.environ.pop(PLACEMENT_VARIABLE, None)
    else:
        os.environ[PLACEMENT_VARIABLE] = json.dumps(dataclasses.asdict(placement))


def read() -> Placement | None:
    """The placement that `write` wrote; None if there is none."""
    text = os.environ.get(PLACEMENT_VARIABLE)
    return None if text is None else Placement(**json.loads(text))


def rank_cpus() -> str:
    """The CPUs of each rank of a target, as in `0-3|4-7`; `all` lets SGLang distribute them."""
    return os.environ.get(_RANK_CPUS) or "all"


def place_ranks(groups: Sequence[str]) -> None:
    """Set the CPUs of each rank, as lists such as `0,1`, for the processes that this one starts.

    An empty `groups` withdraws the CPUs of an earlier server of this process. It does not change
    what the user has set.
    """
    global _placed
    if groups:
        os.environ[_RANK_CPUS] = _placed = "|".join(groups)
    elif _placed is not None:
        if os.environ.get(_RANK_CPUS) == _placed:
            del os.environ[_RANK_CPUS]
        _placed = None


def places_threads() -> bool:
    """Whether the environment says on which CPUs, or with how many threads, the target runs."""
    return bool(thread_variables())


def thread_variables() -> dict[str, str]:
    """The environment variables that say on which CPUs, or with how many threads, torch runs."""
    names = ("OMP_NUM_THREADS", _RANK_CPUS)
    return {name: text for name in names if (text := os.environ.get(name))}
