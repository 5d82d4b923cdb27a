"""Memory and open files of a server's processes, by role."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from benchmark.harness.server import Server

SIDECAR = "sidecar"
SERVER_ROLES = ("front", "scheduler", "detokenizer", "other")
ROLES = (*SERVER_ROLES, SIDECAR)


@dataclass(frozen=True)
class Usage:
    """What the processes of one role hold together."""

    pid: int
    """Pid of one of the processes."""
    rss: int
    """Resident memory, in bytes, shared pages too."""
    uss: int | None
    """Memory of the process alone, in bytes; None where it was not measured."""
    files: int
    """Open file descriptors."""


def role_of(process: psutil.Process, front: int) -> str:
    """`front` is the pid of the server's first process."""
    if process.pid == front:
        return "front"
    title = " ".join(process.cmdline())
    if "sglang_qspec.sidecar" in title:
        return SIDECAR
    for role in ("scheduler", "detokenizer"):
        if f"sglang::{role}" in title:
            return role
    return "other"


def usage(server: Server, with_uss: bool = False) -> dict[str, Usage]:
    """Usage by role, of the processes that still run. `with_uss` takes some milliseconds."""
    found: dict[str, Usage] = {}
    processes = server.processes
    for process in processes:
        try:
            role = role_of(process, processes[0].pid)
            rss = process.memory_info().rss
            uss = process.memory_full_info().uss if with_uss else None
            own = Usage(process.pid, rss, uss, process.num_fds())
        except psutil.Error:
            continue
        if role in found:
            both = found[role]
            summed = None if both.uss is None or own.uss is None else both.uss + own.uss
            own = Usage(both.pid, both.rss + own.rss, summed, both.files + own.files)
        found[role] = own
    return found
