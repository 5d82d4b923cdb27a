"""What a running server with QSPEC says of itself, and how its settings are changed."""

from __future__ import annotations

import time

from benchmark.harness.server import Server


def wait_for_sidecar(server: Server, seconds: float = 120.0) -> None:
    """Wait until drafts can be asked for, so that the run measures speculation, not loading."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = server.get("/server_info")["internal_states"][0]["qspec"]["sidecar"]
        if state == "ready":
            return
        time.sleep(0.25)
    raise RuntimeError(f"the sidecar is {state} after {seconds:g} s:\n{server.log[-4000:]}")
