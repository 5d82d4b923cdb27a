"""What a server and its sidecar say to each other about requests.

A `Courier` owns the link. It submits requests, tells what they have committed and that they are
over, and does so anew for a sidecar that has been replaced. It never waits: what the link does not
take is sent at a later poll, or never.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from sglang_qspec.budget import Sources
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.followed import Followed
from sglang_qspec.engine.live import Live
from sglang_qspec.link import Link, LinkState
from sglang_qspec.messages import Admit, Close, Drafted, Heartbeat
from sglang_qspec.sidecar.process import SidecarProcess
from sglang_qspec.trie import Source

MESSAGES_PER_POLL = 64
"""Bounds the time of one poll: about 10 us a message."""


class Courier:
    """See the module. `link` is None when there is neither a draft model nor an endpoint.

    `sidecar` is the one at its other end, where the server has started it and keeps it alive.
    `live` are the requests, which are another's; here they are read, and given serials. Nothing is
    asked of the sidecar that its `sources` pause.
    """

    def __init__(
        self,
        settings: QSpecConfig,
        live: Mapping[str, Live],
        link: Link | None,
        sidecar: SidecarProcess | None,
        sources: Sources,
    ) -> None:
        self.lead = settings.step_tokens if settings.mode != "queue" else 0
        """How far step drafts are to run ahead of what is committed, in tokens; 0 for none."""
        self.generation = 0
        """Counts the sidecars that have been at the other end."""
        self._on_admission = settings.on_admission
        self._live = live
        self._link = link
        self._sidecar = sidecar
        self._sources = sources
        self._paused: frozenset[Source] = frozenset()
        """What the sidecar has last been kept from."""
        self._serials = itertools.count(1)
        self._unsent: dict[str, None] = {}
        self._followed = Followed()
        self._stopped = False

    @property
    def ready(self) -> bool:
        """Whether a sidecar is in reach."""
        return self._link is not None and self._link.state is LinkState.READY

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The sidecar's latest."""
        return self._link.heartbeat if self._link is not None else None

    def next_serial(self) -> int:
        """For a submission; none is used twice."""
        return next(self._serials)

    def keep_alive(self) -> None:
        """Start our sidecar again if it has gone."""
        if self._sidecar is not None:
            self._sidecar.keep_alive()

    def receive(self) -> list[Drafted]:
        """What the sidecar has sent."""
        messages = self._link.receive(MESSAGES_PER_POLL) if self._link is not None else ()
        return [message for message in messages if isinstance(message, Drafted)]

    def catch_up(self) -> None:
        """Send what could not be sent before, and to a new sidecar all that is live."""
        if self._link is None or not self.ready:
            return
        if self._link.generation != self.generation:
            self._begin_anew(self._link.generation)
        if self._sources.paused != self._paused:
            self._pause(self._sources.paused)
        self._submit_unsent()

    def _begin_anew(self, generation: int) -> None:
        """The sidecar knows none of the live requests: it is new, or has closed them."""
        self.generation = generation
        for rid, live in self._live.items():
            self._followed.end(rid)
            self._ask_anew(live)

    def _pause(self, paused: frozenset[Source]) -> None:
        """Let the sidecar rest if nothing is wanted of it, and ask again for what was not."""
        self._paused = paused
        for live in self._live.values():
            if not self._asks(live):
                self.forget(live)
            elif live.rid not in self._followed:
                self._ask_anew(live)

    def _ask_anew(self, live: Live) -> None:
        live.renew(self.next_serial())
        if live.waits or self._on_admission != "stop":
            self._want(live)

    def submit(self, live: Live) -> None:
        """Ask for the request's drafts, now or as soon as that can be sent."""
        self._want(live)
        self._submit_unsent()

    def _want(self, live: Live) -> None:
        if self._asks(live):
            self._unsent[live.rid] = None

    def _asks(self, live: Live) -> bool:
        """Whether anything that the sidecar drafts may be used for the request."""
        if self._stopped or live.controls.draft_token_num < 2:
            return False
        steps = self.lead > 0 and self._may(live, Source.STEP)
        return steps or self._may(live, Source.QUEUE)

    def _may(self, live: Live, source: Source) -> bool:
        return source.name.lower() in live.controls.sources and source not in self._paused

    def _submit_unsent(self) -> None:
        if self._link is None or not self.ready:
            return
        for rid in list(self._unsent):
            live = self._live[rid]
            message = live.submission(completions=self._may(live, Source.QUEUE))
            if not self._link.send(message):
                return
            self._followed.begin(rid, message.base_len)
            live.unfinished = set(range(message.completions))
            del self._unsent[rid]
            if not live.waits:
                self.admit(live)

    def admit(self, live: Live) -> None:
        """The request waits no longer. What the sidecar does about it is a setting.

        Best effort: if it cannot be sent now, the drafts only come in another order.
        """
        if self._on_admission == "stop":
            self.forget(live)
        elif self._on_admission == "defer" and live.rid in self._followed and self.ready:
            assert self._link is not None
            self._link.send(Admit(rid=live.rid, serial=live.serial))

    def forget(self, live: Live) -> None:
        """Nothing more is to be drafted for the request."""
        live.unfinished.clear()
        self._unsent.pop(live.rid, None)
        if live.rid in self._followed and self._link is not None:
            self._followed.end(live.rid)
            self._link.send(Close(rid=live.rid, serial=live.serial))

    def stop(self) -> None:
        """Nothing is to be drafted for any request until `resume`."""
        self._stopped = True
        for live in self._live.values():
            self.forget(live)

    def resume(self) -> None:
        """Have all that is live drafted for anew."""
        self._stopped = False
        self._begin_anew(self.generation)
        self._submit_unsent()

    def report(self, rids: Iterable[str]) -> None:
        """Let the sidecar follow what these requests have committed."""
        if self._link is not None and self.ready and self.lead and Source.STEP not in self._paused:
            self._followed.report(rids, self._live, self._link, self.lead)

    def knows(self, live: Live, output_len: int) -> bool:
        """Whether a sidecar that knows so much of the request's output knows all it was told."""
        return self._followed.knows(live.rid, output_len)

    def awaits(self, live: Live) -> bool:
        """Whether more of the request's step draft is about to come."""
        return self._followed.awaits(live)

    def describe(self) -> dict[str, object]:
        """For /server_info and /metrics. What only a sidecar in reach does, is zero without one."""
        link, heartbeat, ready = self._link, self.heartbeat, self.ready
        in_flight = sum(bool(live.unfinished) for live in self._live.values())
        return {
            "sidecar": "none" if link is None else link.state.value,
            "sidecar_restarts": self._sidecar.restarts if self._sidecar is not None else 0,
            "requests_in_flight": in_flight if ready else 0,
            "drafting_requests": heartbeat.requests if heartbeat and ready else 0,
            "drafting_rows": heartbeat.rows if heartbeat and ready else 0,
            "drafted_tokens": heartbeat.drafted_tokens if heartbeat else 0,
            "step_passes": heartbeat.step_passes if heartbeat else 0,
            "step_tokens": heartbeat.step_tokens if heartbeat else 0,
            "step_seconds": heartbeat.step_seconds if heartbeat else 0.0,
            "dropped_messages": {
                "to_sidecar": link.dropped if link is not None else 0,
                "from_sidecar": heartbeat.dropped_messages if heartbeat else 0,
                "malformed": link.malformed if link is not None else 0,
            },
        }

    def close(self) -> None:
        """Dismiss our sidecar and close the link: nothing is sent or received any more."""
        if self._sidecar is not None:
            self._sidecar.dismiss()
        if self._link is not None:
            self._link.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if what is to be sent is of no live request."""
        if not self._unsent.keys() <= self._live.keys():
            raise RuntimeError("a request that is over waits to be submitted")
