"""What a running server with QSPEC says of itself, and how its settings are changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from benchmark.harness.run import Counters
from benchmark.harness.server import Server, ServerError

SETTLED_SECONDS = 1.3
"""The sidecar reports its counters about once a second."""
DRAFTING_SECONDS = 2.5
LIMIT_SECONDS = 120.0
POLL_SECONDS = 0.25


def state_of(server: Server, timeout: float = 60.0) -> dict[str, Any]:
    """What QSPEC reports in /server_info. Raises ServerError or OSError."""
    state: dict[str, Any] = server.get("/server_info", timeout)["internal_states"][0]["qspec"]
    return state


def update_settings(server: Server, settings: Mapping[str, int]) -> None:
    """Change settings of a running server. Raises ServerError if it refuses them."""
    if server.post("/set_internal_state", {"server_args": dict(settings)}) != [True]:
        raise ServerError(f"the server refused {dict(settings)}")


def sidecar_of(server: Server) -> psutil.Process:
    """The sidecar's process. Raises LookupError if there is none, or psutil.NoSuchProcess."""
    for process in server.processes:
        if "sglang_qspec.sidecar" in " ".join(process.cmdline()) and process.is_running():
            return process
    raise LookupError("the server has no sidecar now")


def wait_for_sidecar(server: Server, seconds: float = LIMIT_SECONDS) -> None:
    """Wait until the sidecar can draft, so that the loading of its model is not measured.

    Raises RuntimeError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = state_of(server)["sidecar"]
        if state == "ready":
            return
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the sidecar is {state} after {seconds:g} s:\n{server.log[-4000:]}")


def await_drafts(server: Server, warm_up: Callable[[], object]) -> None:
    """Warm up until the sidecar drafts: after a pause each side may take the other for lost.

    Raises RuntimeError if the sidecar drafts nothing for LIMIT_SECONDS.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    before = state_of(server)["drafted_tokens"]
    while time.monotonic() < deadline:
        warm_up()
        reported = time.monotonic() + DRAFTING_SECONDS
        while time.monotonic() < reported:
            # More, not merely another count: a new sidecar counts from 0.
            if state_of(server)["drafted_tokens"] > before:
                return
            time.sleep(POLL_SECONDS)
        before = min(before, state_of(server)["drafted_tokens"])
    raise RuntimeError(f"the sidecar has drafted nothing for {LIMIT_SECONDS:g} s")


def settled_counters(server: Server) -> Counters:
    """The server's counters, once the sidecar has nothing left to draft and has reported that.

    Raises RuntimeError if it still drafts after LIMIT_SECONDS.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    since, last = time.monotonic(), None
    while time.monotonic() < deadline:
        state = state_of(server)
        if state["drafted_tokens"] != last or state["drafting_rows"]:
            since, last = time.monotonic(), state["drafted_tokens"]
        elif time.monotonic() - since >= SETTLED_SECONDS:
            return Counters.of(state)
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the sidecar still drafts {LIMIT_SECONDS:g} s after the last answer")
