"""The server's client of one sidecar: submits requests, reports commits, closes submissions.

It never waits: a message that the link does not take is sent at a later poll.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.sidecar.commit_reporter import CommitReporter
from sglang_qspec.engine.sidecar.limits import SidecarLimits
from sglang_qspec.engine.sidecar.pacing import Pacing, completions_of
from sglang_qspec.engine.sidecar.terms import Terms
from sglang_qspec.engine.sidecar.unsent import Unsent
from sglang_qspec.link import Delivery, Faults, Link, LinkState
from sglang_qspec.messages import (
    Admit,
    Close,
    Declined,
    Drafted,
    Gap,
    Heartbeat,
    Submit,
)
from sglang_qspec.policy import Route, SidecarLoad
from sglang_qspec.trie import Source

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

    def __init__(self, link: Link, terms: Terms, number: int = 0) -> None:
        """`number` distinguishes the sidecars of a server in metrics."""
        self.number = number
        self.load = SidecarLoad()
        self.session_count = 0
        """The link's `session_count` at the last `catch_up`."""
        self.declined = 0
        """Number of times that this client stopped asking for drafts of a request."""
        self._live: dict[str, LiveRequest] = {}
        """The requests that this sidecar drafts for; the client changes only their `drafting`."""
        self._prompts: Counter[Route] = Counter()
        """Number of `_live` for each prompt and scope; requests without a route do not count."""
        self._link = link
        self._terms = terms
        self._unsent = Unsent()
        self._open: dict[int, int] = {}
        """Number of tokens that the sidecar keeps for each open submission."""
        self._rids: dict[int, str] = {}
        """The rid of each open submission."""
        self._open_tokens = 0
        """Sum of `_open`."""
        self._unfinished = 0
        """Number of open submissions with unfinished completions."""
        self._unclosed: dict[int, None] = {}
        """Numbers of ended submissions; the link has not taken their Close yet."""
        self._faults = Faults(logger, terms.clock, owner=f"sidecar {link.endpoint}")
        self._reporter = CommitReporter()
        self._limits = SidecarLimits(link, terms.vocab_size)
        self._pacing = Pacing(terms.clock)

    def __contains__(self, rid: str) -> bool:
        return rid in self._live

    @property
    def endpoint(self) -> str:
        """Address of the sidecar."""
        return self._link.endpoint

    @property
    def state(self) -> LinkState:
        """State of the link to the sidecar."""
        return self._link.state

    @property
    def ready(self) -> bool:
        """Whether the sidecar is connected."""
        return self._link.state is LinkState.READY

    @property
    def wanted(self) -> bool:
        """Whether any of its requests asks for the sidecar's drafts."""
        return bool(self._open or self._unsent)

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The latest heartbeat; None before the first."""
        return self._link.heartbeat

    @property
    def overload(self) -> int:
        """The `OverloadLevel` of the connected sidecar."""
        return self.heartbeat.overload if self.heartbeat is not None and self.ready else 0

    @property
    def requests(self) -> tuple[LiveRequest, ...]:
        """The live requests that this sidecar drafts for."""
        return tuple(self._live.values())

    @property
    def request_count(self) -> int:
        """Number of `requests`."""
        return len(self._live)

    def observe_load(self) -> None:
        """Update `load` by what the sidecar says, and by what this server waits for."""
        self.load.observe(self.heartbeat, self._unfinished)

    def count(self, live: LiveRequest, accepted: int, output: int) -> None:
        """Note how many of the `output` tokens of a request's pass this sidecar drafted right."""
        if live.drafting.submission is not None or live.drafting.declined:
            self.load.count(accepted, output)

    def receive(self, limit: int) -> list[tuple[LiveRequest, Drafted]]:
        """Drafts among at most `limit` messages, each with its request.

        Drafts of closed submissions are dropped.
        """
        # Without live requests the target's CPUs are idle.
        self._link.starved = self._terms.starved and bool(self._live)
        drafted = []
        for message in self._link.receive(limit):
            if not isinstance(message, Drafted | Gap | Declined):
                continue
            live = self._live_of(message.submission)
            if live is None:
                continue
            if isinstance(message, Drafted):
                if self._note(live, message):
                    drafted.append((live, message))
            elif isinstance(message, Gap):
                self._repair(live, message)
            elif message.retry and message.retry_after_s > 0 and live.waits:
                self._ask_anew(live)
                self._pacing.note_declined(len(self._open), message.retry_after_s)
            elif message.retry and live.drafting.repairs < MAX_REPAIRS:
                live.drafting.repairs += 1
                self._ask_anew(live)
            else:
                self._decline(live, message.reason)
        return drafted

    def _note(self, live: LiveRequest, message: Drafted) -> bool:
        """Update the request's state; False for a completion that the server did not ask for."""
        state = live.drafting
        if is_step(message):
            state.has_steps = True
            done = message.finished and self.knows(live, message.known_len)
            state.complete_at = len(live.output_ids) if done else None
        elif message.completion >= live.controls.completions:
            return False
        elif message.finished and state.unfinished:
            state.unfinished.discard(message.completion)
            self._unfinished -= not state.unfinished
        return True

    def _live_of(self, submission: int) -> LiveRequest | None:
        """The request of an open submission; None for a closed one."""
        rid = self._rids.get(submission)
        return self._live.get(rid) if rid is not None else None

    def _repair(self, live: LiveRequest, gap: Gap) -> None:
        """Let the next report, or a new submission, send the tokens that the sidecar lacks."""
        if gap.known_len is not None and not self._reporter.rewind(gap.submission, gap.known_len):
            return  # a later report has sent the tokens
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
        if self._link.session_count != self.session_count:
            self.session_count = self._link.session_count
            self._unclosed.clear()
            self.begin_anew()
        self._close_unclosed(budget_s)
        self._submit_unsent(budget_s)

    def begin_anew(self) -> None:
        """Submit all its live requests: the sidecar is new, or has forgotten them."""
        self._pacing = Pacing(self._terms.clock)
        for live in self._live.values():
            self._part(live)
            live.drafting.declined, live.drafting.repairs = False, 0
            self._ask_anew(live)

    def reconsider(self) -> None:
        """After the terms have changed, close submissions that ask for nothing; submit others."""
        for live in self._live.values():
            if not self._terms.asks(live):
                self.forget(live)
            elif live.drafting.submission is None:
                self._ask_anew(live)

    def _ask_anew(self, live: LiveRequest) -> None:
        self.forget(live)
        if live.waits or self._terms.on_admission != "stop":
            self._want(live)

    def take_over(self, live: LiveRequest) -> None:
        """Draft for a request that another sidecar has drafted for, from its present text on."""
        self._keep(live)
        live.drafting.declined, live.drafting.repairs = False, 0
        self._ask_anew(live)

    def submit(self, live: LiveRequest) -> None:
        """Ask for drafts of the request as soon as the link takes the message."""
        if self._live.pop(live.rid, None) is not None:
            self._live[live.rid] = live  # at the end of the order
        else:
            self._keep(live)
        self._want(live)
        self._submit_unsent()

    def _keep(self, live: LiveRequest) -> None:
        """Begin to draft for a request; its route does not change before its release."""
        self._live[live.rid] = live
        if live.drafting.route is not None:
            self._prompts[live.drafting.route] += 1

    def has_prompt(self, route: Route) -> bool:
        """Whether the sidecar drafts for a request with this prompt and scope."""
        return route in self._prompts

    def _want(self, live: LiveRequest) -> None:
        if self._terms.asks(live):
            self._unsent.add(live)

    def _submit_unsent(self, budget_s: float = SUBMIT_BUDGET_S) -> None:
        """Submit served requests, then waiting ones, until the link or the sidecar is full."""
        if not self.ready:
            return
        until = self._terms.clock() + budget_s
        while self._unsent and self._terms.clock() <= until:
            live = self._live[self._unsent.first]
            if (objection := self._limits.objection(live)) is not None:
                self._decline(live, objection)
                continue
            if not self._has_room(live):
                return
            if live.waits and not self._pacing.allow(len(self._open), self.overload):
                return
            message = live.submit(
                next(self._terms.numbers),
                completions=completions_of(live, self._terms, self.overload),
                vocab_size=self._limits.shared_ids,
                scope=self._terms.scopes.number_of(live.scope),
            )
            match self._link.send(message):
                case Delivery.LATER:
                    return
                case Delivery.NEVER:
                    self._decline(live, "its submission cannot be sent")
                case Delivery.TAKEN:
                    self._note_open(live, message)

    def _has_room(self, live: LiveRequest) -> bool:
        """Whether the sidecar has room for the request's text."""
        tokens = self._open_tokens + live.text_len
        submissions = len(self._open) + len(self._unclosed)
        return not self._open or self._limits.have_room_for(submissions, tokens)

    def _note_open(self, live: LiveRequest, message: Submit) -> None:
        """Note that the link has taken the Submit of a request."""
        number = live.drafting.submission = message.submission
        self._open[number], self._rids[number] = len(message.token_ids), live.rid
        self._open_tokens += self._open[number]
        self._reporter.begin(number, message.base_len)
        live.drafting.unfinished = set(range(message.completions))
        self._unfinished += message.completions > 0
        self._unsent.drop(live.rid)
        if not live.waits:
            self.admit(live)

    def admit(self, live: LiveRequest) -> None:
        """Apply the setting `on_admission` to a request that SGLang serves now.

        Best effort: a lost message only changes the order of drafting.
        """
        on_admission = self._terms.on_admission
        if on_admission == "stop":
            self.forget(live)
        elif self._unsent.admit(live):
            pass  # its Submit will show that the request is served
        elif on_admission == "defer" and live.drafting.submission is not None and self.ready:
            self._link.send(Admit(live.drafting.submission))

    def follow(self, live: LiveRequest, token_ids: Sequence[int]) -> None:
        """Decline a request after output that the draft model cannot read."""
        objection = self._limits.objection_to(token_ids)
        if objection is not None and not live.drafting.declined:
            self._decline(live, objection)

    def forget(self, live: LiveRequest) -> None:
        """End the request's submission. A Close that the link does not take is sent later."""
        self._unsent.drop(live.rid)
        if live.drafting.submission is not None:
            self._unclosed[live.drafting.submission] = None
        self._part(live)
        self._close_unclosed()

    def release(self, live: LiveRequest) -> None:
        """Draft no more for the request: it has ended, or another sidecar takes it over."""
        self.forget(live)
        del self._live[live.rid]
        if live.drafting.route is not None:
            self._prompts[live.drafting.route] -= 1
            if not self._prompts[live.drafting.route]:
                del self._prompts[live.drafting.route]

    def _part(self, live: LiveRequest) -> None:
        """Forget the request's open submission, if there is one."""
        if live.drafting.submission is not None:
            self._open_tokens -= self._open.pop(live.drafting.submission)
            del self._rids[live.drafting.submission]
            self._reporter.end(live.drafting.submission)
            self._unfinished -= bool(live.drafting.unfinished)
        live.drafting.end_submission()

    def _close_unclosed(self, budget_s: float = SUBMIT_BUDGET_S) -> None:
        until = self._terms.clock() + budget_s
        while self._unclosed and self._terms.clock() <= until:
            number = next(iter(self._unclosed))
            if self._link.send(Close(number)) is Delivery.LATER:
                return
            del self._unclosed[number]

    def report(self, rids: Iterable[str]) -> None:
        """Report the committed output of its requests among `rids` to the sidecar."""
        lookahead = self._terms.lookahead
        if self.ready and lookahead and Source.STEP not in self._terms.paused:
            requests = [live for rid in rids if (live := self._live.get(rid)) is not None]
            for commit in self._reporter.report(requests, self._link, lookahead):
                # The sidecar keeps outputs too. A token sent twice counts twice, so the count is
                # never too low.
                self._open[commit.submission] += len(commit.token_ids)
                self._open_tokens += len(commit.token_ids)

    def knows(self, live: LiveRequest, output_len: int) -> bool:
        """Whether a sidecar that knows `output_len` output tokens has read all reports."""
        return self._reporter.knows(live, output_len)

    def awaits(self, live: LiveRequest) -> bool:
        """Whether the sidecar is about to send more of the request's step draft."""
        return self.ready and self._reporter.awaits(live)

    def stepping(self, rids: Iterable[str]) -> int:
        """Number of its requests among `rids` that get step drafts while they are served."""
        if not self.ready:
            return 0
        lives = (self._live.get(rid) for rid in rids)
        return sum(live is not None and live.drafting.has_steps for live in lives)

    @property
    def dropped(self) -> int:
        """Number of messages that the link did not take."""
        return self._link.dropped

    @property
    def malformed(self) -> int:
        """Number of messages that the protocol does not allow."""
        return self._link.malformed

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the open submissions are not those of its requests."""
        if not self._unsent.rids <= self._live.keys():
            raise RuntimeError("an ended request waits to be submitted")
        numbers = {live.drafting.submission: live.rid for live in self._live.values()}
        submitted = {number: rid for number, rid in numbers.items() if number is not None}
        if submitted != self._rids or self._rids.keys() != self._open.keys():
            raise RuntimeError("the open submissions are not those of the live requests")
        routes = Counter(live.drafting.route for live in self._live.values())
        if any(routes[route] != count for route, count in self._prompts.items()):
            raise RuntimeError("the prompts are not those of the live requests")
        if self._unfinished != sum(bool(live.drafting.unfinished) for live in self._live.values()):
            raise RuntimeError("the number of requests with unfinished completions is wrong")
        if self._open_tokens != sum(self._open.values()):
            raise RuntimeError("the token count of the open submissions is wrong")
