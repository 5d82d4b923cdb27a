"""Chooses the sidecar that drafts for each live request.

A live request stays with its sidecar until the sidecar is gone; then another one takes it over.
`policy.routing` has the rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.sidecar.client import SidecarClient
from sglang_qspec.link import Faults, LinkState
from sglang_qspec.policy import Route, routing
from sglang_qspec.policy.routing import Candidate
from sglang_qspec.policy.sidecar_load import weights_of

HANDOVER_S = 0.002
"""Seconds after which a poll moves no further request of a lost sidecar. To move all of several
thousand requests at once would delay the target's next pass."""

logger = logging.getLogger(__name__)


class Router:
    """Routes requests to `clients`, a list that its owner changes."""

    def __init__(self, clients: Sequence[SidecarClient], clock: Callable[[], float]) -> None:
        self.handovers = 0
        """Number of requests that another sidecar has taken over from a lost one."""
        self._clients = clients
        self._clock = clock
        self._faults = Faults(logger, clock, owner="sidecars")

    def client_of(self, live: LiveRequest) -> SidecarClient | None:
        """The client of a request's sidecar; None if it has none."""
        for client in self._clients:
            if live.rid in client.requests:
                return client
        return None

    def choose(self, live: LiveRequest) -> SidecarClient:
        """The sidecar for a request without one: a connected one, or else one that may come."""
        if len(self._clients) == 1:
            return self._clients[0]
        route = live.drafting.route or Route.of(live.prompt_ids, live.scope)
        live.drafting.route = route
        candidates = (
            [client for client in self._clients if client.ready]
            or [client for client in self._clients if client.link.state is not LinkState.REFUSED]
            or self._clients
        )
        for client in candidates:
            if route in client.routes:
                return client
        for client in candidates:
            client.observe_load()
        clients = {client.link.endpoint: client for client in candidates}
        weights = weights_of({endpoint: client.load for endpoint, client in clients.items()})
        chosen = routing.choose(
            route,
            {
                endpoint: Candidate(weights[endpoint], len(client.requests))
                for endpoint, client in clients.items()
            },
        )
        return clients[chosen]

    def hand_over(self) -> None:
        """Let the connected sidecars take over requests of the others, for about HANDOVER_S."""
        if not any(client.ready for client in self._clients):
            return
        until = self._clock() + HANDOVER_S
        for client in self._clients:
            if client.requests and not client.ready:
                self._hand_over_from(client, until)

    def _hand_over_from(self, lost: SidecarClient, until: float) -> None:
        """Let other sidecars take over the requests of one; at least one request moves."""
        moved = 0
        for live in tuple(lost.requests.values()):
            lost.release(live)
            self.choose(live).take_over(live)
            moved += 1
            if self._clock() > until:
                break
        detail = f"{moved} of {lost.link.endpoint}, which is {lost.link.state.value}"
        self._faults.note("requests move to other sidecars", detail)
        self.handovers += moved
