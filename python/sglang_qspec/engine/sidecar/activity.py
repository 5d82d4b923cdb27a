"""Describes the sidecars of a server, for /server_info and /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_qspec.engine.sidecar.client import SidecarClient
from sglang_qspec.link import LinkState
from sglang_qspec.messages import Heartbeat
from sglang_qspec.policy.sidecar_load import weights_of
from sglang_qspec.sidecar.figures import REPORTED, Figure

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
    return {
        "sidecar": "none" if (state := best_state(clients)) is None else state.value,
        "requests_in_flight": sum(
            client.submissions.unfinished for client in clients if client.ready
        ),
        "declined_requests": counts.get("declined", 0),
        "dropped_messages": {
            "to_sidecar": counts.get("to_sidecar", 0),
            "from_sidecar": sum(each["dropped_messages"] for each in listed),
            "malformed": counts.get("malformed", 0),
        },
        **{
            figure.summary: figure.of_all(_value(client, figure) for client in clients)
            for figure in REPORTED
            if figure.summary
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
    return {
        "number": client.number,
        "endpoint": client.link.endpoint,
        "state": client.link.state.value,
        "sessions": client.session_count,
        "requests": len(client.requests),
        "rests": client.rests,
        "weight": weight,
        **{figure.entry: _value(client, figure) for figure in REPORTED if figure.entry},
    }


def _value(client: SidecarClient, figure: Figure) -> float:
    """A figure of the sidecar's latest heartbeat; 0 without one, or if it no longer holds."""
    heartbeat = client.link.heartbeat if client.ready or figure.is_total else None
    value: float = getattr(heartbeat or IDLE, figure.name)
    return value
