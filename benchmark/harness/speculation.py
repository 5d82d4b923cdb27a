"""Reads the state that QSPEC reports in a running server, and changes its settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from benchmark.harness.run import Counters
from benchmark.harness.server import Server, ServerError

SIDECAR_MODULE = "sglang_qspec.sidecar "
"""What the command line of a sidecar contains, but not that of a fork server."""
SETTLED_SECONDS = 1.3
"""Time for the sidecar to report its counters, which it does about once a second."""
WORKING_SECONDS = 2.5
"""Time for a sidecar to work on a warm-up and to report that, before the next warm-up."""
LIMIT_SECONDS = 120.0
STATE_SECONDS = 60.0
"""Time limit for an answer of /server_info."""
POLL_SECONDS = 0.25


def state_of(server: Server) -> dict[str, Any]:
    """The state of QSPEC's first scheduler in /server_info. Raises ServerError or OSError."""
    return states_of(server)[0]


def states_of(server: Server) -> list[dict[str, Any]]:
    """The states of QSPEC in all schedulers, by `dp_rank`. Raises ServerError or OSError."""
    parts = server.get("/server_info", STATE_SECONDS)["internal_states"]
    return sorted((part["qspec"] for part in parts), key=lambda state: state.get("dp_rank", 0))


def update_settings(server: Server, settings: Mapping[str, int]) -> None:
    """Change settings of a running server. Raises ServerError if it refuses them."""
    if server.post("/set_internal_state", {"server_args": dict(settings)}) != [True]:
        raise ServerError(f"the server refused {dict(settings)}")


def sidecars_of(server: Server) -> list[psutil.Process]:
    """The processes of sidecars that run. Raises psutil.NoSuchProcess."""
    named = (each for each in server.processes if SIDECAR_MODULE in " ".join(each.cmdline()))
    return [process for process in named if process.is_running()]


def sidecar_of(server: Server) -> psutil.Process:
    """The sidecar's process. Raises LookupError without one, or psutil.NoSuchProcess."""
    for process in sidecars_of(server):
        return process
    raise LookupError("the server has no sidecar process")


def states(server: Server, seconds: float, complaint: str) -> Iterator[dict[str, Any]]:
    """The state of QSPEC every POLL_SECONDS. Raises RuntimeError after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield state_of(server)
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"{complaint} after {seconds:g} s:\n{getattr(server, 'log', '')[-4000:]}")


def wait_for_sidecar(server: Server, seconds: float = LIMIT_SECONDS) -> None:
    """Wait until the sidecar has loaded its model. Raises RuntimeError after `seconds`."""
    for state in states(server, seconds, "the sidecar is not ready"):
        if state["sidecar"] == "ready":
            return


def await_work(server: Server, warm_up: Callable[[], object]) -> None:
    """Warm up until the sidecar works: after a pause each side may think that the other is lost.

    A pass over a prompt is work, too: a warm-up can end before the sidecar drafts. It does nothing
    where the server lets it rest, because the target uses its CPUs, nor does a head whose drafts do
    not pay. Raises RuntimeError if another sidecar does nothing for LIMIT_SECONDS.
    """
    before, due = None, 0.0
    for state in states(server, LIMIT_SECONDS, "the sidecar has done nothing"):
        worked = state["sidecar_pass_seconds"]
        # A new sidecar counts from 0, so a smaller figure does not prove a pass.
        if before is not None and (worked > before or rests(state)):
            return
        if time.monotonic() >= due:
            before = worked if before is None else min(before, worked)
            warm_up()
            due = time.monotonic() + WORKING_SECONDS


def rests(state: Mapping[str, Any]) -> bool:
    """Whether the server makes no use of its sidecar, because it predicted or measured that."""
    return head_rests(state) or any(
        each["rests"] for each in state["sidecars"] if each["state"] == "ready"
    )


def head_rests(state: Mapping[str, Any]) -> bool:
    """Whether the server makes no use of the drafts of its head, because it measured that."""
    if not state.get("proposed_tokens", {}).get("head"):
        return False
    uses = {level["drafts"] for level in state["draft_trials"]}
    return state["sources"]["head"]["paused"] or bool(uses - {"all"})


def settled_counters(server: Server) -> Counters:
    """The server's counters, once the sidecar has nothing left to draft and has reported that.

    Raises RuntimeError if it still drafts after LIMIT_SECONDS.
    """
    since, last = time.monotonic(), None
    for state in states(server, LIMIT_SECONDS, "the sidecar still drafts"):
        if state["drafted_tokens"] != last or state["drafting_rows"]:
            since, last = time.monotonic(), state["drafted_tokens"]
        elif time.monotonic() - since >= SETTLED_SECONDS:
            return Counters.of(state)
    raise AssertionError("`states` ends with an error")
