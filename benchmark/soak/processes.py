"""Measures memory and open files of a server's processes, by role."""

from __future__ import annotations

import contextlib
from collections import Counter

import psutil

from benchmark.harness.server import Server
from benchmark.harness.speculation import SIDECAR_MODULE

SIDECAR = "sidecar"
SERVER_ROLES = ("front", "scheduler", "detokenizer", "other")
ROLES = (*SERVER_ROLES, SIDECAR)
FIGURES = ("rss_mib", "uss_mib", "files")
"""Resident memory with shared pages, and private memory, both in MiB; open file descriptors."""
MIB = 2**20


def role_of(process: psutil.Process, front: int) -> str:
    """`front` is the pid of the server's first process."""
    if process.pid == front:
        return "front"
    title = " ".join(process.cmdline())
    if SIDECAR_MODULE in title:
        return SIDECAR
    for role in ("scheduler", "detokenizer"):
        if f"sglang::{role}" in title:
            return role
    return "other"


def usage(server: Server, with_uss: bool = False) -> dict[str, float]:
    """Each of FIGURES over all running processes of a role, such as `front_files`.

    `sidecar_pid` is the pid of a sidecar. The private memory, which takes some milliseconds to
    measure, is there with `with_uss` only.
    """
    found: Counter[str] = Counter()
    pids: dict[str, int] = {}
    processes = server.processes
    for process in processes:
        with contextlib.suppress(psutil.Error):
            role = role_of(process, processes[0].pid)
            own = {"rss_mib": process.memory_info().rss / MIB, "files": process.num_fds()}
            if with_uss:
                own["uss_mib"] = process.memory_full_info().uss / MIB
            found.update({f"{role}_{name}": value for name, value in own.items()})
            if role == SIDECAR:
                pids.setdefault("sidecar_pid", process.pid)
    return {**{name: round(value, 3) for name, value in found.items()}, **pids}
