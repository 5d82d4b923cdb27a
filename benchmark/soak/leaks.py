"""Searches for leaks: state, files and processes that remain after the load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import sidecars_of, state_of, wait_for_sidecar
from benchmark.soak.monitor import SIDECAR_STATE, STATE
from benchmark.soak.processes import SIDECAR, usage

IDLE_S = 180.0
"""Time limit for a server to release the state of aborted requests."""
SIDECAR_S = 600.0
"""Time limit for a new sidecar to load its model on a busy machine."""
SETTLED_S = 3.0
"""Seconds for which all counts must be 0; the sidecar reports its counts once a second."""
FILES_SLACK = 4
"""Allowed growth of a process's open files, for connections that are about to close."""


def held(server: Server) -> dict[str, int]:
    """The state of requests in the server and the sidecar: all counts that are not 0.

    `target_kv_tokens` are the target's KV slots that are neither free nor cached. Raises
    ServerError or OSError.
    """
    state = state_of(server)
    found = {name: int(state.get(name, 0)) for name in (*STATE, *SIDECAR_STATE)}
    found["target_kv_tokens"] = int(server.get("/v1/loads")["loads"][0]["num_used_tokens"])
    return {name: count for name, count in found.items() if count}


def wait_for_idle(server: Server) -> dict[str, int]:
    """Wait until `held` is empty for SETTLED_S; returns the last `held` after IDLE_S."""
    deadline = time.monotonic() + IDLE_S
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
    """Open file descriptors, such as `front_files`, by role."""
    found = usage(server).items()
    return {name: int(count) for name, count in found if name.endswith("_files")}


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Growth of the open files by role, for roles beyond FILES_SLACK."""
    found = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: growth for name, growth in found.items() if growth > FILES_SLACK}


def find(server: Server, files_before: Mapping[str, int]) -> dict[str, Any]:
    """The leaks by name; empty without leaks. The load must have ended."""
    found: dict[str, Any] = {}
    try:
        wait_for_sidecar(server, SIDECAR_S)
    except (RuntimeError, OSError):
        found["sidecar_not_ready"] = 1
    found |= wait_for_idle(server)
    found |= grown(files_before, files_of(server))
    if (sidecars := len(sidecars_of(server))) != 1:
        found[f"{SIDECAR}_processes"] = sidecars
    return found
