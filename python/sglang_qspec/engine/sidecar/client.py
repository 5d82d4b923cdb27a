"""The server's client of the sidecar: submits requests, reports commits, closes submissions.

It never waits: a message that the link does not take is sent at a later poll.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from sglang_qspec.config import MAX_COMPLETIONS, QSpecConfig
from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.sidecar.commit_reporter import CommitReporter
from sglang_qspec.engine.sidecar.limits import SidecarLimits
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
from sglang_qspec.policy import Sources
from sglang_qspec.sidecar.child_process import SidecarProcess
from sglang_qspec.trie import Source

STREAMS_PER_SUBMISSION = 1 << 20
"""Completions and step drafts of one submission have numbers below this."""
MESSAGES_PER_POLL = 64
"""Maximum number of messages that one poll reads; a message takes about 10 us."""
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
    """Submits live requests to the sidecar and reports their commits.

    `link` is None for a server with neither a draft model nor an endpoint. `sidecar` is the process
    that this server started, or None. The speculator owns the `live` requests; the client changes
    only their `drafting`. The client asks for no drafts of paused `sources`. `vocab_size` is the
    target's number of token ids.

    The client numbers the submissions. It opens no more submissions than the sidecar accepts from
    one server, and submits further requests when others have ended.
    """

    def __init__(
        self,
        settings: QSpecConfig,
        live: Mapping[str, LiveRequest],
        link: Link | None,
        sidecar: SidecarProcess | None,
        sources: Sources,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lookahead = settings.step_tokens if settings.mode != "queue" else 0
        """Maximum lookahead of step drafts, in tokens; 0 for no step drafts."""
        self.session_count = 0
        """The link's `session_count` at the last `catch_up`."""
        self._on_admission = settings.on_admission
        self._live = live
        self._link = link
        self._sidecar = sidecar
        self._sources = sources
        self._paused: frozenset[Source] = frozenset()
        """Sources that were paused at the last `catch_up`."""
        self._clock = clock
        self._numbers = itertools.count(1)
        self._unsent: dict[str, None] = {}
        self._open: dict[int, int] = {}
        """Number of tokens that the sidecar keeps for each open submission."""
        self._rids: dict[int, str] = {}
        """The rid of each open submission."""
        self._open_tokens = 0
        """Sum of `_open`."""
        self._unclosed: dict[int, None] = {}
        """Numbers of ended submissions; the link has not taken their Close yet."""
        self._declined = 0
        self._faults = Faults(logger, clock, owner="sidecar")
        self._reporter = CommitReporter()
        self._limits = SidecarLimits(link, vocab_size)
        self._stopped = False

    @property
    def ready(self) -> bool:
        """Whether a sidecar is connected."""
        return self._link is not None and self._link.state is LinkState.READY

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The latest heartbeat; None before the first."""
        return self._link.heartbeat if self._link is not None else None

    def keep_alive(self) -> None:
        """Restart the server's own sidecar if it has ended."""
        if self._sidecar is not None:
            self._sidecar.keep_alive()

    def receive(self) -> list[tuple[LiveRequest, Drafted]]:
        """The received drafts, each with its request. Drafts of closed submissions are dropped."""
        messages = self._link.receive(MESSAGES_PER_POLL) if self._link is not None else ()
        drafted = []
        for message in messages:
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
        elif message.finished:
            state.unfinished.discard(message.completion)
        return True

    def _live_of(self, submission: int) -> LiveRequest | None:
        """The request of an open submission; None for a closed one."""
        rid = self._rids.get(submission)
        return self._live.get(rid) if rid is not None else None

    def _repair(self, live: LiveRequest, gap: Gap) -> None:
        """Let the next report, or a new submission, send the tokens that the sidecar lacks."""
        if gap.known_len is not None and not self._reporter.rewind(gap.submission, gap.known_len):
            return  # a report has sent them since
        live.drafting.repairs += 1
        if live.drafting.repairs > MAX_REPAIRS:
            self._decline(live, "the sidecar keeps asking for tokens that it was sent")
        elif gap.known_len is None:
            self._ask_anew(live)

    def _decline(self, live: LiveRequest, reason: str) -> None:
        """Serve the request without this sidecar's drafts; a new sidecar is asked again."""
        live.drafting.declined = True
        self._declined += 1
        self._faults.note("no drafts for a request", reason)
        self.forget(live)

    def catch_up(self) -> None:
        """Send pending messages. A new sidecar gets all live requests."""
        if self._link is None or not self.ready:
            return
        if self._link.session_count != self.session_count:
            self.session_count = self._link.session_count
            self._unclosed.clear()
            self._begin_anew()
        if self._sources.paused != self._paused:
            self._pause(self._sources.paused)
        self._close_unclosed()
        self._submit_unsent()

    def _begin_anew(self) -> None:
        """Submit all live requests: the sidecar is new, or has forgotten them."""
        for live in self._live.values():
            self._part(live)
            live.drafting.declined, live.drafting.repairs = False, 0
            self._ask_anew(live)

    def _pause(self, paused: frozenset[Source]) -> None:
        """Close the submissions of requests that use only paused sources, and submit the others."""
        self._paused = paused
        for live in self._live.values():
            if not self._asks(live):
                self.forget(live)
            elif live.drafting.submission is None:
                self._ask_anew(live)

    def _ask_anew(self, live: LiveRequest) -> None:
        self.forget(live)
        if live.waits or self._on_admission != "stop":
            self._want(live)

    def submit(self, live: LiveRequest) -> None:
        """Ask for drafts of the request as soon as the link takes the message."""
        self._want(live)
        self._submit_unsent()

    def _want(self, live: LiveRequest) -> None:
        if self._asks(live):
            self._unsent[live.rid] = None

    def _asks(self, live: LiveRequest) -> bool:
        """Whether the request may use any of the sidecar's drafts."""
        if self._stopped or live.drafting.declined or live.controls.draft_token_num < 2:
            return False
        steps = self.lookahead > 0 and self._may(live, Source.STEP)
        return steps or self._may(live, Source.QUEUE)

    def _may(self, live: LiveRequest, source: Source) -> bool:
        return source.name.lower() in live.controls.sources and source not in self._paused

    def _submit_unsent(self) -> None:
        """Submit waiting requests, oldest first, until the link or the sidecar is full."""
        if self._link is None or not self.ready:
            return
        until = self._clock() + SUBMIT_BUDGET_S
        while self._unsent and self._clock() <= until:
            live = self._live[next(iter(self._unsent))]
            if (objection := self._limits.objection(live)) is not None:
                self._decline(live, objection)
                continue
            if not self._has_room(live):
                return
            number = next(self._numbers)
            message = live.submit(
                number,
                completions=self._may(live, Source.QUEUE),
                vocab_size=self._limits.shared_ids,
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
        del self._unsent[live.rid]
        if not live.waits:
            self.admit(live)

    def admit(self, live: LiveRequest) -> None:
        """Apply the setting `on_admission` to a request that SGLang serves now.

        Best effort: a lost message only changes the order of drafting.
        """
        if self._on_admission == "stop":
            self.forget(live)
        elif self._on_admission == "defer" and live.drafting.submission is not None and self.ready:
            assert self._link is not None
            self._link.send(Admit(live.drafting.submission))

    def follow(self, live: LiveRequest, token_ids: Sequence[int]) -> None:
        """Decline a request after output that the draft model cannot read."""
        objection = self._limits.objection_to(token_ids)
        if objection is not None and not live.drafting.declined:
            self._decline(live, objection)

    def forget(self, live: LiveRequest) -> None:
        """End the request's submission. A Close that the link does not take is sent later."""
        self._unsent.pop(live.rid, None)
        if live.drafting.submission is not None:
            self._unclosed[live.drafting.submission] = None
        self._part(live)
        self._close_unclosed()

    def _part(self, live: LiveRequest) -> None:
        """Forget the request's open submission, if there is one."""
        if live.drafting.submission is not None:
            self._open_tokens -= self._open.pop(live.drafting.submission)
            del self._rids[live.drafting.submission]
            self._reporter.end(live.drafting.submission)
        live.drafting.end_submission()

    def _close_unclosed(self) -> None:
        until = self._clock() + SUBMIT_BUDGET_S
        while self._unclosed and self._link is not None and self._clock() <= until:
            number = next(iter(self._unclosed))
            if self._link.send(Close(number)) is Delivery.LATER:
                return
            del self._unclosed[number]

    def stop(self) -> None:
        """End all submissions, and open none before `resume`."""
        self._stopped = True
        for live in self._live.values():
            self.forget(live)

    def resume(self) -> None:
        """Submit all live requests again."""
        self._stopped = False
        self._begin_anew()
        self._submit_unsent()

    def report(self, rids: Iterable[str]) -> None:
        """Report the committed output of these requests to the sidecar."""
        if (
            self._link is not None
            and self.ready
            and self.lookahead
            and Source.STEP not in self._paused
        ):
            requests = [live for rid in rids if (live := self._live.get(rid)) is not None]
            for commit in self._reporter.report(requests, self._link, self.lookahead):
                # The sidecar keeps outputs too. A token sent twice counts twice, so the count is
                # never too low.
                self._open[commit.submission] += len(commit.token_ids)
                self._open_tokens += len(commit.token_ids)

    def knows(self, live: LiveRequest, output_len: int) -> bool:
        """Whether a sidecar that knows `output_len` output tokens has read all reports."""
        return self._reporter.knows(live, output_len)

    def awaits(self, live: LiveRequest) -> bool:
        """Whether the sidecar is about to send more of the request's step draft."""
        return self._reporter.awaits(live)

    def stepping(self, rids: Iterable[str]) -> int:
        """Number of these requests that get step drafts while they are served."""
        if not self.ready or Source.STEP in self._sources.paused:
            return 0
        lives = (self._live.get(rid) for rid in rids)
        return sum(live is not None and live.drafting.has_steps for live in lives)

    @property
    def step_times(self) -> list[tuple[float, float]]:
        """Mean seconds of a step pass by its size: (completions, seconds), smallest size first."""
        return self.heartbeat.step_times if self.heartbeat is not None else []

    def describe(self) -> dict[str, object]:
        """State for /server_info and /metrics. Without a connected sidecar, its activity is 0."""
        link, heartbeat, ready = self._link, self.heartbeat, self.ready
        in_flight = sum(bool(live.drafting.unfinished) for live in self._live.values())
        return {
            "sidecar": "none" if link is None else link.state.value,
            "sidecar_restarts": self._sidecar.restarts if self._sidecar is not None else 0,
            "requests_in_flight": in_flight if ready else 0,
            "drafting_requests": heartbeat.requests if heartbeat and ready else 0,
            "drafting_rows": heartbeat.rows if heartbeat and ready else 0,
            "declined_requests": self._declined,
            "sidecar_texts": heartbeat.texts if heartbeat and ready else 0,
            "sidecar_rows": heartbeat.kv_rows if heartbeat and ready else 0,
            "sidecar_kv_tokens": heartbeat.kv_tokens if heartbeat and ready else 0,
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
        """End the server's own sidecar and close the link."""
        if self._sidecar is not None:
            self._sidecar.dismiss()
        if self._link is not None:
            self._link.close()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the open submissions are not those of the live requests."""
        if not self._unsent.keys() <= self._live.keys():
            raise RuntimeError("an ended request waits to be submitted")
        numbers = {live.drafting.submission: live.rid for live in self._live.values()}
        submitted = {number: rid for number, rid in numbers.items() if number is not None}
        if submitted != self._rids or self._rids.keys() != self._open.keys():
            raise RuntimeError("the open submissions are not those of the live requests")
        if self._open_tokens != sum(self._open.values()):
            raise RuntimeError("the token count of the open submissions is wrong")
