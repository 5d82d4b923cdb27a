"""Selects the devices, CPUs and priority of this process.

All but `lower_priority` come before the first import of torch, because CUDA reads the visible
devices only once. A fork of a process that has imported torch runs on a CPU, and sets torch's
threads itself.
"""

from __future__ import annotations

import contextlib
import os
import sys

from sglang_qspec import config, values
from sglang_qspec.cpu.install import install_kernels
from sglang_qspec.errors import ConfigError
from sglang_qspec.sidecar import log_thread


def settle_device(device: str) -> str | None:
    """Hide other devices from this process; return `cpu`, `cuda`, or None for SGLang's choice."""
    try:
        kind, _, index = values.device(device).partition(":")
    except ValueError as error:
        raise ConfigError(f"--device is {device!r}, but must be {error}") from None
    if kind == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        install_kernels()  # the import of this package has not, if the variable was not set yet
    elif kind == "cuda":
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
        _settle_gpu(device, index)
    return kind or None


def _settle_gpu(device: str, index: str) -> None:
    """Hide all visible GPUs except number `index`; an empty text hides none."""
    visible = config.visible_gpus()
    if visible is None:
        names = [str(number) for number in range(int(index or 0) + 1)]
    else:
        names = [] if visible in ("", "-1") else visible.split(",")
    if int(index or 0) >= len(names):
        most = f"N must be at most {len(names) - 1}" if names else "no GPU is visible"
        raise ConfigError(
            f"--device is {device!r}, but CUDA_VISIBLE_DEVICES is {visible!r}, so {most}"
        )
    if index:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[int(index)]


def settle_cores(text: str) -> None:
    """Run on the CPUs in the list `text`, with one thread on each."""
    try:
        cores = values.parse_cores(text)
        if not cores:
            return
        os.sched_setaffinity(0, cores)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--cores is {text!r}: {error}") from None
    _use_threads(len(cores))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(cores)))


def yield_gpu() -> None:
    """Let kernels of the server go first if sidecar and server share a GPU through CUDA MPS.

    CUDA reads the variable when the process initializes it; 1 is "below normal". Without MPS the
    GPU switches between the two processes, whatever their priorities are.
    """
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")


def halve_threads() -> None:
    """Run half the threads on the CPUs of the starting server."""
    _use_threads(max(1, len(os.sched_getaffinity(0)) // 2))


def _use_threads(count: int) -> None:
    """Run this number of threads; torch reads the environment when it is imported."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def lower_priority(*, idle: bool) -> None:
    """Run at the lowest priority or, with `idle`, only while nothing else wants the CPUs.

    At the lowest priority alone, Linux lets a process end its time slice of some milliseconds
    before a thread of the target that wakes up gets the CPU. A process of the idle class gives way
    at once. Where that class is not allowed, the lowest priority remains. Both belong to a thread,
    and new threads take over those of the thread that starts them. The thread that writes the log
    keeps its priority (`log_thread`).
    """
    threads = os.listdir("/proc/self/task")
    log_thread.begin()
    for thread in map(int, threads):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, 19)
            if idle:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
