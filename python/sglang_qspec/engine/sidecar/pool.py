"""The sidecars of a server: one, or a few (`values.MAX_ENDPOINTS`)."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.config import QSpecConfig
from sglang_qspec.draft_source import OF_SIDECAR
from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.sidecar import activity
from sglang_qspec.engine.sidecar.absence import Absence
from sglang_qspec.engine.sidecar.client import SUBMIT_BUDGET_S, SidecarClient
from sglang_qspec.engine.sidecar.demand import Demand
from sglang_qspec.engine.sidecar.router import Router
from sglang_qspec.errors import LinkError
from sglang_qspec.link import Link, LinkState
from sglang_qspec.link.link import POLL_BUDGET_S
from sglang_qspec.messages import Drafted
from sglang_qspec.policy import Sources
from sglang_qspec.policy.sidecar_load import joint_step_times
from sglang_qspec.sidecar.child_process import SidecarProcess
from sglang_qspec.trie import Source

MESSAGES_PER_POLL = 64
"""Maximum number of messages that one poll reads of all sidecars; a message takes about 10 us."""
FEWEST_MESSAGES = 8
"""Maximum number of messages that one poll reads of a sidecar, if there are many sidecars."""

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    """The sidecars of a server at its start; none for a server without draft model and endpoint."""

    links: Sequence[Link] = ()
    process: SidecarProcess | None = None
    """The sidecar of this server; None if others run its sidecars."""
    connect: Callable[[str], Link] | None = None
    """Begins to connect to a further endpoint; None for a server without endpoints. Raises
    LinkError if the endpoint is not allowed."""
    waits: bool = False
    """Whether `process` has not started yet. It shares the target's GPU."""
    of_head: bool = False
    """Whether the sidecar runs a head."""
    has_model: bool = True
    """Whether it runs a draft model."""


class SidecarPool:
    """Routes the live requests of a server to its sidecars.

    The speculator owns the `live` requests. The clients change only their `drafting`.
    """

    def __init__(
        self,
        settings: QSpecConfig,
        live: Mapping[str, LiveRequest],
        opened: Opened,
        sources: Sources,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        given = (settings, sources, vocab_size, clock)
        self._demand = Demand.of(*given, of_head=opened.of_head, has_model=opened.has_model)
        self._starved = False
        """Whether the target uses the CPUs of its own sidecar, which then may not answer."""
        self._rests: bool | None = None
        """Whether the sidecar is to rest; None if the target never uses its CPUs."""
        self._live = live
        self._sources = sources
        self._process = opened.process
        self._waits = opened.waits
        self._connect = opened.connect
        self._clients: list[SidecarClient] = []
        self._router = Router(self._clients, clock)
        self._next = 0
        """Index of the client that the next poll reads first."""
        self._past: Counter[str] = Counter()
        """Sums of `activity.counts_of` over removed sidecars."""
        self._absence = Absence(opened.process, clock)
        for link in opened.links:
            self._add(link)

    @property
    def source(self) -> Source:
        """Source of what the sidecars draft while a request is served."""
        return self._demand.source

    @property
    def lookahead(self) -> int:
        """Maximum lookahead of step drafts, in tokens; 0 for no step drafts."""
        return self._demand.lookahead

    @lookahead.setter
    def lookahead(self, tokens: int) -> None:
        self._demand.lookahead = tokens

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses of the sidecars."""
        return tuple(client.link.endpoint for client in self._clients)

    @property
    def ready(self) -> bool:
        """Whether any sidecar is connected."""
        return any(client.ready for client in self._clients)

    @property
    def wanted(self) -> bool:
        """Whether any live request asks for a sidecar's drafts."""
        return any(client.wanted for client in self._clients)

    @property
    def may_come(self) -> bool:
        """Whether a sidecar is connected, or may connect once it has CPU time."""
        return any(client.link.state is not LinkState.REFUSED for client in self._clients)

    @property
    def session_count(self) -> int:
        """Number of sessions with all sidecars so far; it changes if any sidecar is new."""
        return self._past["sessions"] + sum(client.session_count for client in self._clients)

    def start_waiting(self) -> None:
        """Start the server's own sidecar, if it waited until the target had sized its KV."""
        waits, self._waits = self._waits, False
        if waits and self._process is not None:
            self._process.start()

    def keep_alive(self) -> None:
        """Restart the server's own sidecar if it has ended; warn if no sidecar connects."""
        if self._process is not None:
            self._process.keep_alive(connected=self.ready)
        self._absence.look(activity.best_state(self._clients))

    def receive(self) -> list[tuple[LiveRequest, Drafted]]:
        """The received drafts, each with its request. Drafts of closed submissions are dropped.

        After `POLL_BUDGET_S` it reads no further sidecar; the next call begins with that sidecar.
        """
        if self._rests is not None:
            if not self._live:
                # The target's CPUs are idle, and the sidecar may answer. It rests on: what it began
                # with the first request would last into the passes that need all CPUs.
                self._starved, self._rests = False, True
            self._tell()
        drafted: list[tuple[LiveRequest, Drafted]] = []
        count = len(self._clients)
        limit = max(FEWEST_MESSAGES, MESSAGES_PER_POLL // max(1, count))
        until = self._demand.clock() + POLL_BUDGET_S
        for _ in range(count):
            client = self._clients[self._next % count]
            self._next = (self._next + 1) % count
            drafted += client.receive(limit)
            if self._demand.clock() >= until:
                break
        return drafted

    def starve(self, starved: bool) -> None:
        """Say whether the target uses the CPUs of its own sidecar from the next pass on.

        The sidecar then rests, since it would hardly advance and slow the target down, and its
        silence is no sign of a fault.
        """
        self._starved = self._rests = starved
        self._tell()

    def _tell(self) -> None:
        """Tell the links whether the sidecar is starved, and the sidecar whether to rest."""
        for client in self._clients:
            client.link.starved = self._starved
            client.rest(bool(self._rests))

    def catch_up(self) -> None:
        """Send pending messages. Connected sidecars take over the requests of lost ones."""
        if self._sources.paused != self._demand.paused:
            self._demand.paused = self._sources.paused
            self._reconsider()
        if len(self._clients) > 1:
            self._router.hand_over()
        for client in self._clients:
            client.catch_up(SUBMIT_BUDGET_S / len(self._clients))

    def _reconsider(self) -> None:
        for client in self._clients:
            client.reconsider()

    def submit(self, live: LiveRequest) -> None:
        """Ask a sidecar for drafts of a request, the same one as before if it is connected."""
        client = self._router.client_of(live)
        if client is None and self._clients:
            client = self._router.choose(live)
        if client is not None:
            client.submit(live)

    def admit(self, live: LiveRequest) -> None:
        """Apply the setting `on_admission` to a request that SGLang serves now."""
        if (client := self._router.client_of(live)) is not None:
            client.admit(live)

    def follow(self, live: LiveRequest, token_ids: Sequence[int]) -> None:
        """Decline a request after output that its sidecar's draft model cannot read."""
        if (client := self._router.client_of(live)) is not None:
            client.follow(live, token_ids)

    def show_states(self, live: LiveRequest, start: int, states: NDArray[np.int16]) -> None:
        """Send hidden states of the target to the sidecar of a request, as `SidecarClient`."""
        if (client := self._router.client_of(live)) is not None:
            client.show_states(live, start, states)

    def forget(self, live: LiveRequest) -> None:
        """End the request's submission; the request stays live."""
        if (client := self._router.client_of(live)) is not None:
            client.forget(live)

    def end(self, live: LiveRequest) -> None:
        """Forget a request that is no longer live."""
        if (client := self._router.client_of(live)) is not None:
            client.release(live)

    def allow_steps(self, allowed: bool) -> None:
        """Allow step drafts in further rounds, or end them."""
        if self._demand.may_step != allowed:
            self._demand.may_step = allowed
            self._reconsider()

    def stop(self) -> None:
        """End all submissions, and open none before `resume`."""
        self._demand.stopped = True
        self._reconsider()

    def resume(self) -> None:
        """Submit all live requests again."""
        self._demand.stopped = False
        for client in self._clients:
            client.begin_anew()
            client.catch_up(SUBMIT_BUDGET_S / len(self._clients))

    def report(self, rids: Sequence[str]) -> None:
        """Report the committed output of the requests `rids` to their sidecars."""
        for client in self._clients:
            client.report(rids)

    def count(self, live: LiveRequest, drafted_by: Sequence[Source], passes: int = 1) -> None:
        """Note which sources drafted the accepted tokens of a request, without the target's own."""
        if len(self._clients) > 1 and (client := self._router.client_of(live)) is not None:
            right = sum(source in OF_SIDECAR for source in drafted_by)
            client.count(live, right, len(drafted_by) + passes)

    def awaits(self, live: LiveRequest) -> bool:
        """Whether a sidecar is about to send more of the request's step draft."""
        client = self._router.client_of(live)
        return client is not None and client.awaits(live)

    def stepping(self, rids: Sequence[str]) -> int:
        """Number of the requests `rids` that get step drafts while they are served."""
        if self.source in self._sources.paused:
            return 0
        return sum(client.stepping(rids) for client in self._clients)

    @property
    def step_times(self) -> list[tuple[float, float]]:
        """Mean seconds of a step pass by its size: (completions, seconds), smallest size first.

        Several sidecars count as one that takes as long as the slowest one with its share.
        """
        beats = [client.link.heartbeat for client in self._clients if client.ready]
        return joint_step_times([beat.step_times for beat in beats if beat is not None])

    @property
    def read_seconds(self) -> float:
        """Seconds for which a prompt token is read, if the sidecars divide the prompts evenly.

        0 before it is known.
        """
        beats = [client.link.heartbeat for client in self._clients if client.ready]
        seconds = [beat.read_seconds for beat in beats if beat is not None]
        return max(seconds, default=0.0) / max(1, len(seconds))

    def change(self, endpoints: Sequence[str]) -> None:
        """Connect to the sidecars at these addresses, and leave all others.

        The links connect later. The remaining sidecars take over the requests of the others.
        """
        assert self._connect is not None, "a server with its own sidecar has no endpoints"
        for client in [each for each in self._clients if each.link.endpoint not in endpoints]:
            self._remove(client)
        for endpoint in endpoints:
            if endpoint not in self.endpoints:
                try:
                    self._add(self._connect(endpoint))
                except LinkError as error:
                    logger.error("no sidecar is added: %s", error)
        for live in self._live.values():
            if self._clients and self._router.client_of(live) is None:
                self._router.choose(live).take_over(live)

    def _add(self, link: Link) -> None:
        used = {client.number for client in self._clients}
        number = next(number for number in range(len(used) + 1) if number not in used)
        self._clients.append(SidecarClient(link, self._demand, number))

    def _remove(self, client: SidecarClient) -> None:
        """Leave a sidecar. Its requests are without one until `change` chooses another."""
        for live in tuple(client.requests.values()):
            client.release(live)
        self._clients.remove(client)
        self._past.update(activity.counts_of(client))
        client.link.close()

    def describe(self) -> dict[str, object]:
        """State for /server_info and /metrics. Without a connected sidecar, its activity is 0."""
        return {
            "sidecar_restarts": self._process.restarts if self._process is not None else 0,
            "sidecar_warning": self._absence.warning,
            "handovers": self._router.handovers,
            **activity.describe(self._clients, self._past),
        }

    def close(self) -> None:
        """Close the links, and end the server's own sidecar if no other scheduler uses it."""
        if self._process is not None and not self._process.shared:
            self._process.dismiss()
        for client in self._clients:
            client.link.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if a live request does not have exactly one sidecar."""
        for client in self._clients:
            client.check_integrity()
        routed = Counter(rid for client in self._clients for rid in client.requests)
        if self._clients and routed != Counter(self._live.keys()):
            raise RuntimeError("the requests of the sidecars are not the live requests")
