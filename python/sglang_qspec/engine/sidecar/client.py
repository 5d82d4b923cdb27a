"""The server's client of one sidecar: submits requests, reports commits, closes submissions.

It never waits: a message that the link does not take is sent at a later poll.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.sidecar.backpressure import Backpressure, completions_of
from sglang_qspec.engine.sidecar.commit_reporter import CommitReporter
from sglang_qspec.engine.sidecar.demand import Demand
from sglang_qspec.engine.sidecar.limits import SidecarLimits
from sglang_qspec.engine.sidecar.submissions import Submissions
from sglang_qspec.engine.sidecar.submit_queue import SubmitQueue
from sglang_qspec.link import Delivery, Faults, Link, LinkState
from sglang_qspec.messages import (
    MAX_STATE_BYTES,
    Admit,
    Close,
    Declined,
    Drafted,
    Gap,
    Rest,
    States,
)
from sglang_qspec.policy import Route, SidecarLoad

STREAMS_PER_SUBMISSION = 1 << 20
"""Completions and step drafts of one submission have numbers below this."""
SUBMIT_BUDGET_S = 0.002
"""Seconds after which a poll submits and closes nothing more. Without this limit, the first poll
after the start of a sidecar would submit all live requests at once."""
MAX_REPAIRS = 8
"""Number of repairs after which a request is served without the sidecar."""

logger = logging.getLogger(__name__)


def is_step(drafted: Drafted) -> bool:
    """Whether the tokens belong to a step draft, not to a completion of the waiting request."""
    return MAX_COMPLETIONS <= drafted.completion < STREAMS_PER_SUBMISSION


class SidecarClient:
    """Submits the live requests of one sidecar to it, and reports their commits.

    The client opens no more submissions than the sidecar accepts from one server, and submits
    further requests when others have ended. It asks for no drafts of paused sources.
    """

    def __init__(self, link: Link, demand: Demand, number: int = 0) -> None:
        """`number` distinguishes the sidecars of a server in metrics."""
        self.link = link
        self.number = number
        self.load = SidecarLoad()
        self.requests: dict[str, LiveRequest] = {}
        """The live requests that this sidecar drafts for, by rid; the client changes only their
        `drafting`."""
        self.routes: Counter[Route] = Counter()
        """Number of `requests` for each prompt and scope; requests without a route do not count."""
        self.submissions = Submissions()
        self.session_count = 0
        """The link's `session_count` at the last `catch_up`."""
        self.declined = 0
        """Number of times that this client stopped asking for drafts of a request."""
        self.rests = False
        """Whether the sidecar has been told to rest."""
        self._demand = demand
        self._queue = SubmitQueue()
        self._reporter = CommitReporter(link, self.submissions)
        self._limits = SidecarLimits(link, demand.vocab_size)
        self._backpressure = Backpressure(demand.clock)
        self._faults = Faults(logger, demand.clock, owner=f"sidecar {link.endpoint}")

    @property
    def ready(self) -> bool:
        """Whether the sidecar is connected."""
        return self.link.state is LinkState.READY

    @property
    def wanted(self) -> bool:
        """Whether any of its requests asks for the sidecar's drafts."""
        return bool(self.submissions or self._queue)

    @property
    def overload(self) -> int:
        """The `OverloadLevel` of the connected sidecar."""
        heartbeat = self.link.heartbeat
        return heartbeat.overload if heartbeat is not None and self.ready else 0

    def observe_load(self) -> None:
        """Update `load` by what the sidecar says, and by what this server waits for."""
        self.load.observe(self.link.heartbeat, self.submissions.unfinished)

    def count(self, live: LiveRequest, accepted: int, output: int) -> None:
        """Note how many of the `output` tokens of a request's pass this sidecar drafted right."""
        if live.drafting.submission is not None or live.drafting.declined:
            self.load.count(accepted, output)

    def receive(self, limit: int) -> list[tuple[LiveRequest, Drafted]]:
        """Drafts among at most `limit` messages, each with its request.

        Drafts of closed submissions are dropped.
        """
        drafted = []
        for message in self.link.receive(limit):
            if not isinstance(message, Drafted | Gap | Declined):
                continue
            live = self.submissions.request(message.submission)
            if live is None:
                continue
            if isinstance(message, Drafted):
                if self._note(live, message):
                    drafted.append((live, message))
            elif isinstance(message, Gap):
                self._repair(live, message)
            elif message.retry and message.retry_after_s > 0 and live.waits:
                self._ask_anew(live)
                self._backpressure.note_declined(len(self.submissions), message.retry_after_s)
            elif message.retry and live.drafting.repairs < MAX_REPAIRS:
                live.drafting.repairs += 1
                self._ask_anew(live)
            else:
                self._decline(live, message.reason)
        return drafted

    def _note(self, live: LiveRequest, message: Drafted) -> bool:
        """Update the request's state; False for a completion that the server did not ask for."""
        submission = live.drafting.submission
        assert submission is not None
        if is_step(message):
            submission.has_steps = True
            done = message.finished and message.known_len == submission.reported
            submission.complete_at = len(live.output_ids) if done else None
        elif message.completion >= live.controls.completions:
            return False
        elif message.finished:
            self.submissions.finish(submission, message.completion)
        return True

    def _repair(self, live: LiveRequest, gap: Gap) -> None:
        """Let the next report, or a new submission, send the tokens that the sidecar lacks."""
        submission = live.drafting.submission
        assert submission is not None
        if gap.known_len is not None:
            if gap.known_len >= submission.reported:
                return  # a later report has sent the tokens
            submission.reported = gap.known_len
        live.drafting.repairs += 1
        if live.drafting.repairs > MAX_REPAIRS:
            self._decline(live, "the sidecar keeps asking for tokens that the server has sent")
        elif gap.known_len is None:
            self._ask_anew(live)

    def _decline(self, live: LiveRequest, reason: str) -> None:
        """Serve the request without this sidecar's drafts; a new sidecar is asked again."""
        live.drafting.declined = True
        self.declined += 1
        self._faults.note("no drafts for a request", reason)
        self.forget(live)

    def catch_up(self, budget_s: float = SUBMIT_BUDGET_S) -> None:
        """Send pending messages for about `budget_s`. A new sidecar gets all its live requests."""
        if not self.ready:
            return
        if self.link.session_count != self.session_count:
            self.session_count = self.link.session_count
            self.submissions.unclosed.clear()
            self.rests = False
            self.begin_anew()
        self._send_closes(budget_s)
        self._send_submits(budget_s)

    def begin_anew(self) -> None:
        """Submit all its live requests: the sidecar is new, or has forgotten them."""
        self._backpressure = Backpressure(self._demand.clock)
        for live in self.requests.values():
            self.submissions.end(live, close=False)
            live.drafting.declined, live.drafting.repairs = False, 0
            self._ask_anew(live)

    def reconsider(self) -> None:
        """After the demand has changed, close submissions that ask for nothing; submit others."""
        for live in self.requests.values():
            if not self._demand.asks(live):
                self.forget(live)
            elif live.drafting.submission is None:
                self._ask_anew(live)

    def rest(self, rests: bool) -> None:
        """Tell the sidecar to run no passes, or to go on.

        Best effort: the link has taken the message once the attribute `rests` has changed.
        """
        if rests != self.rests and self.ready and self.link.send(Rest(rests)):
            self.rests = rests

    def _ask_anew(self, live: LiveRequest) -> None:
        self.forget(live)
        if live.waits or self._demand.on_admission != "stop":
            self._enqueue(live)

    def take_over(self, live: LiveRequest) -> None:
        """Draft for a request that another sidecar has drafted for, from its present text on."""
        self._add(live)
        live.drafting.declined, live.drafting.repairs = False, 0
        self._ask_anew(live)

    def submit(self, live: LiveRequest) -> None:
        """Ask for drafts of the request as soon as the link takes the message."""
        if self.requests.pop(live.rid, None) is not None:
            self.requests[live.rid] = live  # at the end of the order
        else:
            self._add(live)
        self._enqueue(live)
        self._send_submits()

    def _add(self, live: LiveRequest) -> None:
        """Begin to draft for a request; its route does not change before its release."""
        self.requests[live.rid] = live
        if live.drafting.route is not None:
            self.routes[live.drafting.route] += 1

    def _enqueue(self, live: LiveRequest) -> None:
        if self._demand.asks(live):
            self._queue.add(live)

    def _send_submits(self, budget_s: float = SUBMIT_BUDGET_S) -> None:
        """Submit served requests, then waiting ones, until the link or the sidecar is full."""
        if not self.ready:
            return
        until = self._demand.clock() + budget_s
        while self._queue and self._demand.clock() <= until:
            live = self.requests[self._queue.first]
            if (objection := self._limits.objection(live)) is not None:
                self._decline(live, objection)
                continue
            if not self._has_room(live):
                return
            if live.waits and not self._backpressure.allow(len(self.submissions), self.overload):
                return
            message = live.submit(
                next(self._demand.numbers),
                completions=completions_of(live, self._demand, self.overload),
                vocab_size=self._limits.shared_ids,
                scope=self._demand.scopes.number_of(live.scope),
            )
            match self.link.send(message):
                case Delivery.LATER:
                    return
                case Delivery.NEVER:
                    self._decline(live, "its submission cannot be sent")
                case Delivery.TAKEN:
                    self.submissions.open(live, message)
                    self._queue.drop(live.rid)
                    if not live.waits:
                        self.admit(live)

    def _has_room(self, live: LiveRequest) -> bool:
        """Whether the sidecar has room for the request's text."""
        tokens = self.submissions.tokens + live.text_len
        return not self.submissions or self._limits.have_room_for(self.submissions.kept, tokens)

    def admit(self, live: LiveRequest) -> None:
        """Apply the setting `on_admission` to a request that SGLang serves now.

        Best effort: a lost message only changes the order of drafting.
        """
        on_admission, submission = self._demand.on_admission, live.drafting.submission
        if on_admission == "stop":
            self.forget(live)
        elif self._queue.admit(live):
            pass  # its Submit will show that the request is served
        elif on_admission == "defer" and submission is not None and self.ready:
            self.link.send(Admit(submission.number))

    def follow(self, live: LiveRequest, token_ids: Sequence[int]) -> None:
        """Decline a request after output that the draft model cannot read."""
        objection = self._limits.objection_to(token_ids)
        if objection is not None and not live.drafting.declined:
            self._decline(live, objection)

    def show_states(self, live: LiveRequest, start: int, states: NDArray[np.int16]) -> None:
        """Send a head the target's states from position `start` of the request's text on.

        They are bfloat16 as int16 [tokens, width]. Best effort: behind states that the link does
        not take the head begins anew.
        """
        submission = live.drafting.submission
        if submission is None or not self.ready:
            return
        each = max(1, MAX_STATE_BYTES // states[0].nbytes)
        for place in range(0, len(states), each):
            data = states[place : place + each].tobytes()
            if not self.link.send(States(submission.number, start + place, data)):
                return

    def forget(self, live: LiveRequest) -> None:
        """End the request's submission. A Close that the link does not take is sent later."""
        self._queue.drop(live.rid)
        self.submissions.end(live, close=True)
        self._send_closes()

    def release(self, live: LiveRequest) -> None:
        """Draft no more for the request: it has ended, or another sidecar takes it over."""
        self.forget(live)
        del self.requests[live.rid]
        if live.drafting.route is not None:
            self.routes[live.drafting.route] -= 1
            if not self.routes[live.drafting.route]:
                del self.routes[live.drafting.route]

    def _send_closes(self, budget_s: float = SUBMIT_BUDGET_S) -> None:
        unclosed = self.submissions.unclosed
        until = self._demand.clock() + budget_s
        while unclosed and self._demand.clock() <= until:
            number = next(iter(unclosed))
            if self.link.send(Close(number)) is Delivery.LATER:
                return
            del unclosed[number]

    def report(self, rids: Iterable[str]) -> None:
        """Report the committed output of its requests among `rids` to the sidecar."""
        demand = self._demand
        if self.ready and demand.lookahead and demand.source not in demand.paused:
            own = [live for live in self._own(rids) if demand.may(live, demand.source)]
            self._reporter.report(own, demand.lookahead)

    def _own(self, rids: Iterable[str]) -> list[LiveRequest]:
        """Its requests among `rids`."""
        return [live for rid in rids if (live := self.requests.get(rid)) is not None]

    def awaits(self, live: LiveRequest) -> bool:
        """Whether the sidecar is about to send more of the request's step draft."""
        submission = live.drafting.submission
        return (
            self.ready
            and submission is not None
            and submission.grows(len(live.output_ids))
            and live.longest_draft > 1
        )

    def stepping(self, rids: Iterable[str]) -> int:
        """Number of its requests among `rids` that get step drafts while they are served."""
        if not self.ready:
            return 0
        submissions = (live.drafting.submission for live in self._own(rids))
        return sum(each is not None and each.has_steps for each in submissions)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the open submissions are not those of its requests."""
        if not self._queue.rids <= self.requests.keys():
            raise RuntimeError("an ended request waits to be submitted")
        routes = Counter(live.drafting.route for live in self.requests.values())
        if any(routes[route] != count for route, count in self.routes.items()):
            raise RuntimeError("the prompts are not those of the live requests")
        self.submissions.check_integrity(self.requests.values())
