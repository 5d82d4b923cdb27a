"""Lets several ranks of a target run on one machine's CPUs.

SGLang 0.5.23 gives every process group on a CPU an NCCL communicator, which fails where NCCL is
installed. It also leaves all ranks on the same CPUs unless its own CPU kernels run. Its data
parallel controller asks for requests without a pause, and takes a whole CPU that a rank could use.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.numa_utils import get_cpu_ids_by_node

from sglang_qspec.engine.placement import environment
from sglang_qspec.errors import ConfigError
from sglang_qspec.values import parse_cores

CONTROLLER_WAIT_MS = 50
"""Longest wait of the data parallel controller for a request. A request ends the wait at once."""
_CONTROLLER = "sglang.srt.managers.data_parallel_controller"


def install() -> None:
    """Change how SGLang makes process groups and places ranks; repeated calls change nothing."""
    groups, binding = parallel_state.init_model_parallel_group, bootstrap._bind_threads_if_cpu
    if not hasattr(groups, "__wrapped__"):
        parallel_state.init_model_parallel_group = _without_nccl(groups)
        bootstrap._bind_threads_if_cpu = _then_pin(binding)
    controller: Any = sys.modules.get(_CONTROLLER)  # in the controller's process, among others
    if controller is not None and not hasattr(controller.sock_recv, "__wrapped__"):
        controller.sock_recv = _wait_first(controller.sock_recv)


def _wait_first(receive: Any) -> Any:
    """Let a receive call without a wait be preceded by a short wait for a message."""

    @wraps(receive)
    def received(socket: Any, flags: int = 0) -> Any:
        if flags:
            socket.poll(CONTROLLER_WAIT_MS)
        return receive(socket, flags=flags)

    return received


def _without_nccl(make: Any) -> Any:
    @wraps(make)
    def made(group_ranks: Any, local_rank: int, backend: str, *args: Any, **given: Any) -> Any:
        if backend == "gloo" and not args:
            given["use_pynccl"] = False
        return make(group_ranks, local_rank, backend, *args, **given)

    return made


def _then_pin(bind: Any) -> Any:
    @wraps(bind)
    def bound(*, device: str) -> Any:
        cpus = bind(device=device)
        parallel = get_parallel()
        if cpus is not None and parallel.dp_size * parallel.tp_size * parallel.pp_size > 1:
            pin(parse_cores(cpus) if isinstance(cpus, str) else frozenset(cpus))
        return cpus

    return bound


def pin(cpus: frozenset[int]) -> None:
    """Run all threads of this process on `cpus`, and torch with one thread on each."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cpus)
    torch.set_num_threads(len(cpus))


def place(ranks: int, cores: Sequence[frozenset[int]], *, spare: int = 0) -> None:
    """Give each of several ranks whole cores, for the processes that this one starts.

    `cores` are the hardware threads of each core. The last `spare` of them stay free if there are
    enough. Does nothing if the environment places the ranks, or if there are NUMA nodes enough,
    over which SGLang distributes them itself. Raises ConfigError if there are fewer cores than
    ranks.
    """
    if ranks == 1 or environment.rank_cpus() != "all" or ranks <= len(get_cpu_ids_by_node()):
        return
    if len(cores) < ranks:
        raise ConfigError(
            f"the target has {ranks} ranks (--tp-size times --dp-size), but there are only "
            f"{len(cores)} CPU cores for them"
        )
    used = max(ranks, len(cores) - spare)
    environment.place_ranks(groups_of(ranks, cores[:used]))


def groups_of(ranks: int, cores: Sequence[frozenset[int]]) -> list[str]:
    """The CPUs of each rank as a list such as `0,1`; all ranks get the same number of cores."""
    each = len(cores) // ranks
    parts = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return [",".join(str(cpu) for core in part for cpu in sorted(core)) for part in parts]
