"""Measures memory and open files of a server's processes, by role."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

from benchmark.harness.server import Server
from benchmark.harness.speculation import SIDECAR_MODULE

SIDECAR = "sidecar"
SERVER_ROLES = ("front", "scheduler", "detokenizer", "other")
ROLES = (*SERVER_ROLES, SIDECAR)


@dataclass(frozen=True)
class Usage:
    """Memory and files of all processes of a role."""

    pid: int
    """Pid of one of the processes."""
    rss: int
    """Resident memory with shared pages, in bytes."""
    uss: int | None
    """Private memory in bytes; None if it was not measured."""
    files: int
    """Open file descriptors."""


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


def usage(server: Server, with_uss: bool = False) -> dict[str, Usage]:
    """Usage of the running processes, by role. With `with_uss` the call takes some milliseconds."""
    found: dict[str, list[Usage]] = {}
    processes = server.processes
    for process in processes:
        with contextlib.suppress(psutil.Error):
            role = role_of(process, processes[0].pid)
            rss = process.memory_info().rss
            uss = process.memory_full_info().uss if with_uss else None
            found.setdefault(role, []).append(Usage(process.pid, rss, uss, process.num_fds()))
    return {role: _together(several) for role, several in found.items()}


def _together(several: list[Usage]) -> Usage:
    rss, files = sum(one.rss for one in several), sum(one.files for one in several)
    known = [one.uss for one in several if one.uss is not None]
    return Usage(several[0].pid, rss, sum(known) if len(known) == len(several) else None, files)
