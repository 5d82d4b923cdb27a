"""Describes the sidecars of a server, for /server_info and /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_qspec.engine.sidecar.client import SidecarClient
from sglang_qspec.link import LinkState
from sglang_qspec.messages import Heartbeat
from sglang_qspec.policy.sidecar_load import weights_of

BEST_FIRST = (LinkState.READY, LinkState.CONNECTING, LinkState.LOST, LinkState.REFUSED)
"""States from best to worst; the best state of any sidecar describes the server."""
IDLE = Heartbeat(0, 0, 0, 0)
"""The heartbeat of a sidecar that has not sent one."""


def counts_of(client: SidecarClient) -> dict[str, int]:
    """Counts of this server for one sidecar, which never decrease."""
    return {
        "sessions": client.session_count,
        "declined": client.declined,
        "to_sidecar": client.link.dropped,
        "malformed": client.link.malformed,
    }


def describe(clients: Sequence[SidecarClient], past: Mapping[str, int]) -> dict[str, Any]:
    """The sums over all sidecars, the best state, the largest backlog, and the list `sidecars`.

    The activity of a sidecar that is not connected counts as 0. `past` has the sums of `counts_of`
    over removed sidecars.
    """
    counts = dict(past)
    for client in clients:
        for name, count in counts_of(client).items():
            counts[name] = counts.get(name, 0) + count
    listed = _sidecars(clients)
    latest = [client.link.heartbeat or IDLE for client in clients]
    return {
        "sidecar": "none" if (state := best_state(clients)) is None else state.value,
        "requests_in_flight": sum(
            client.submissions.unfinished for client in clients if client.ready
        ),
        "drafting_requests": sum(each["drafting_requests"] for each in listed),
        "drafting_rows": sum(each["drafting_rows"] for each in listed),
        "declined_requests": counts.get("declined", 0),
        "sidecar_texts": sum(each["texts"] for each in listed),
        "sidecar_rows": sum(each["kv_rows"] for each in listed),
        "sidecar_kv_tokens": sum(each["kv_tokens"] for each in listed),
        "sidecar_backlog_seconds": max((each["backlog_seconds"] for each in listed), default=0.0),
        "sidecar_overload": max((each["overload"] for each in listed), default=0),
        "drafted_tokens": sum(each["drafted_tokens"] for each in listed),
        "step_passes": sum(heartbeat.step_passes for heartbeat in latest),
        "step_tokens": sum(heartbeat.step_tokens for heartbeat in latest),
        "step_seconds": sum(heartbeat.step_seconds for heartbeat in latest),
        "dropped_messages": {
            "to_sidecar": counts.get("to_sidecar", 0),
            "from_sidecar": sum(each["dropped_messages"] for each in listed),
            "malformed": counts.get("malformed", 0),
        },
        "sidecars": listed,
    }


def best_state(clients: Sequence[SidecarClient]) -> LinkState | None:
    """The best state of any sidecar; None without a sidecar."""
    states = (client.link.state for client in clients)
    return min(states, key=BEST_FIRST.index, default=None)


def _sidecars(clients: Sequence[SidecarClient]) -> list[dict[str, Any]]:
    """One entry for each sidecar."""
    for client in clients:
        client.observe_load()
    weights = weights_of({client.link.endpoint: client.load for client in clients})
    return [_entry(client, weights[client.link.endpoint]) for client in clients]


def _entry(client: SidecarClient, weight: float) -> dict[str, Any]:
    latest = client.link.heartbeat or IDLE
    now = latest if client.ready else IDLE
    return {
        "number": client.number,
        "endpoint": client.link.endpoint,
        "state": client.link.state.value,
        "sessions": client.session_count,
        "requests": len(client.requests),
        "weight": weight,
        "drafting_requests": now.requests,
        "drafting_rows": now.rows,
        "texts": now.texts,
        "kv_rows": now.kv_rows,
        "kv_tokens": now.kv_tokens,
        "backlog_seconds": now.backlog_s,
        "overload": now.overload,
        "drafted_tokens": latest.drafted_tokens,
        "dropped_messages": latest.dropped_messages,
    }
