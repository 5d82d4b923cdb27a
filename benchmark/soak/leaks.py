"""What a server still holds when the load has ended; it must be nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import state_of, wait_for_sidecar
from benchmark.soak.monitor import SIDECAR_STATE, STATE
from benchmark.soak.processes import SIDECAR, usage

IDLE_S = 180.0
"""A server has this long to give back what aborted requests held."""
SIDECAR_S = 600.0
"""A sidecar that was killed last may take this long to load its model, on a busy machine."""
SETTLED_S = 3.0
"""Seconds for which all must be 0; the sidecar reports what it holds once a second."""
FILES_SLACK = 4
"""Open files that one process may have more than before: connections that are about to close."""


def held(server: Server) -> dict[str, int]:
    """What requests hold in the server and the sidecar, without what is 0.

    `target_kv_tokens` are the target's KV slots that are neither free nor cached. Raises
    ServerError or OSError.
    """
    state = state_of(server)
    found = {name: int(state.get(name, 0)) for name in (*STATE, *SIDECAR_STATE)}
    found["target_kv_tokens"] = int(server.get("/v1/loads")["loads"][0]["num_used_tokens"])
    return {name: count for name, count in found.items() if count}


def wait_for_idle(server: Server, seconds: float = IDLE_S) -> dict[str, int]:
    """Wait until nothing is held, for SETTLED_S; returns what still is after `seconds`."""
    deadline = time.monotonic() + seconds
    empty_since: float | None = None
    left: dict[str, int] = {"unknown": 1}
    while time.monotonic() < deadline:
        try:
            left = held(server)
        except (ServerError, OSError):
            left = {"unknown": 1}
        now = time.monotonic()
        empty_since = None if left else (empty_since or now)
        if empty_since is not None and now - empty_since >= SETTLED_S:
            return {}
        time.sleep(0.25)
    return left


def files_of(server: Server) -> dict[str, int]:
    """Open file descriptors by role."""
    return {role: held.files for role, held in usage(server).items()}


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Open files by role, of the roles that have more than before by more than FILES_SLACK."""
    return {
        f"{role}_files": count - before.get(role, 0)
        for role, count in after.items()
        if count - before.get(role, 0) > FILES_SLACK
    }


def find(server: Server, files_before: Mapping[str, int]) -> dict[str, Any]:
    """What has leaked, by name; empty if nothing. The load must have ended."""
    found: dict[str, Any] = {}
    try:
        wait_for_sidecar(server, SIDECAR_S)
    except (RuntimeError, OSError):
        found["sidecar_not_ready"] = 1
    found |= wait_for_idle(server)
    found |= grown(files_before, files_of(server))
    sidecars = sum(
        "sglang_qspec.sidecar" in " ".join(process.cmdline())
        for process in server.processes
        if process.is_running()
    )
    if sidecars != 1:
        found[f"{SIDECAR}_processes"] = sidecars
    return found
