"""A simulated sidecar within one process, for tests: scripted drafts and injected failures.

Time is counted in polls, and each call of `receive` is one poll, so runs are deterministic. All
messages pass through the real codec, so the fake rejects the messages that the real link rejects.
"""

from __future__ import annotations

import bisect
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from sglang_qspec.errors import LinkError
from sglang_qspec.link.faults import DROPPED, MALFORMED, Faults
from sglang_qspec.link.frame import decode_from_sidecar, decode_to_sidecar, encode
from sglang_qspec.link.link import Delivery, LinkState
from sglang_qspec.messages import (
    PROTOCOL,
    Admit,
    Close,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    Heartbeat,
    Ping,
    Rest,
    States,
    Submit,
    ToSidecar,
    Welcome,
    max_to_sidecar_bytes,
)

Script = Callable[[Submit], Sequence[Sequence[int]]]
"""Returns the completions of one request, the most likely first. Completions and tokens beyond the
limits of the Submit are dropped."""

logger = logging.getLogger(__name__)


def no_drafts(_: Submit) -> Sequence[Sequence[int]]:
    """Script of a sidecar that drafts nothing."""
    return ()


def pieces(
    submit: Submit,
    completions: Sequence[Sequence[int]],
    chunk: int,
    truncate_to: int | None = None,
) -> Iterator[Drafted]:
    """Messages with the `completions` of `submit`, at most `chunk` tokens in each.

    A completion stops unfinished after `truncate_to` tokens.
    """
    for index, completion in enumerate(completions[: submit.completions]):
        wanted = list(completion[: submit.max_new_tokens])
        kept = wanted[:truncate_to]
        for start in range(0, max(len(kept), 1), chunk):
            piece = kept[start : start + chunk]
            finished = start + len(piece) == len(wanted)
            yield Drafted(submit.submission, index, submit.base_len, start, piece, finished)


@dataclass(frozen=True)
class _InFlight:
    """A frame from the sidecar that is not delivered yet. Times are in polls."""

    sent_at: int
    arrives_at: int
    frame: bytes
    submission: int | None = None
    """The submission of a draft; None for frames that a test injects."""


class FakeSidecarLink:
    """A `Link` to a simulated sidecar, controlled by `script` and the methods below.

    The sidecar drafts all completions of a Submit in parallel. It sends `chunk` tokens of each
    every `interval` polls, and a message arrives `delay` polls later. If both are 0, the next
    `receive` returns all of them.
    """

    def __init__(
        self,
        script: Script = no_drafts,
        *,
        vocab_size: int = 1 << 20,
        chunk: int = 4,
        interval: int = 0,
        delay: int = 0,
        context_len: int = 1 << 20,
        endpoint: str = "fake",
    ) -> None:
        self.endpoint = endpoint
        self.script = script
        self.chunk = chunk
        self.interval = interval
        self.delay = delay
        self.starved = False
        self.drop_all = False
        """While set, all messages from the sidecar are lost."""
        self.queue_full = False
        """While set, `send` returns LATER."""
        self.truncate_to: int | None = None
        """Number of tokens after which completions stop unfinished; None means no limit."""
        self.submits: list[Submit] = []
        """All received Submits, including the Submits before a `revive`."""
        self.closes: list[Close] = []
        """All received Closes."""
        self.rests: list[bool] = []
        """What the received Rests say."""
        self.admits: list[Admit] = []
        """All received Admits."""
        self.commits: list[Commits] = []
        """All received Commits. The sidecar drafts nothing for them; tests use `inject`."""
        self.states: list[States] = []
        """All received States."""

        self._welcome = Welcome(PROTOCOL, "fake", vocab_size, context_len)
        self._faults = Faults(logger)
        self._note_malformed = partial(self._faults.note, MALFORMED)
        self._polls = 0
        self._pending: list[_InFlight] = []  # by arrival
        self._alive = True
        self._closed = False
        self.refusal: str | None = None
        self._session: int | None = None
        self.session_count = 0
        self.sidecar: Welcome | None = None
        self.heartbeat: Heartbeat | None = None

    # Methods of `Link`.

    @property
    def state(self) -> LinkState:
        if self.refusal is not None:
            return LinkState.REFUSED
        if self._session is None:
            return LinkState.LOST if self.session_count else LinkState.CONNECTING
        return LinkState.READY

    @property
    def dropped(self) -> int:
        return self._faults[DROPPED]

    @property
    def malformed(self) -> int:
        return self._faults[MALFORMED]

    def send(self, message: ToSidecar) -> Delivery:
        if self.state is not LinkState.READY or self.queue_full:
            self._faults.note(DROPPED, "the queue is full" if self.queue_full else "down")
            return Delivery.LATER
        max_bytes = max_to_sidecar_bytes(self._welcome.context_len)
        try:
            frame = encode(message, max_bytes)
        except LinkError as error:
            self._note_malformed(error)
            return Delivery.NEVER
        try:
            self._handle(
                decode_to_sidecar(frame, self._welcome.vocab_size, self._note_malformed, max_bytes)
            )
        except LinkError as error:
            self._note_malformed(error)
        return Delivery.TAKEN

    def _handle(self, message: ToSidecar) -> None:
        """Handle one message as the sidecar."""
        match message:
            case Submit():
                self.submits.append(message)
                self._draft(message)
            case Admit():
                self.admits.append(message)
            case Commits():
                self.commits.append(message)
            case States():
                self.states.append(message)
            case Close():
                self.closes.append(message)
                self._forget(message)
            case Rest():
                self.rests.append(message.rests)
            case Ping():
                self.inject(Heartbeat(len(self.submits), 0, 0, 0, answers=message.number))

    def receive(self, limit: int = 256) -> list[FromSidecar]:
        self._polls += 1
        if self._closed or not self._alive or self.refusal is not None:
            return []
        if self._session is None:
            self.session_count += 1
            self._session = self.session_count
            self.sidecar = msgspec.structs.replace(self._welcome, session=str(self._session))
        received: list[FromSidecar] = []
        for _ in range(limit):
            if not self._pending or self._pending[0].arrives_at > self._polls:
                break
            delivered = self._pending.pop(0)
            try:
                message = decode_from_sidecar(delivered.frame, self._welcome.vocab_size)
            except LinkError as error:
                self._note_malformed(error)
                continue
            if isinstance(message, Heartbeat):
                self.heartbeat = message
            elif isinstance(message, Drafted | Gap | Declined):
                received.append(message)
        return received

    def close(self) -> None:
        self._closed = True
        self._session = None
        self._pending.clear()

    # Failures.

    def die(self) -> None:
        """End the sidecar's process; messages that are not delivered yet are lost."""
        self._alive = False
        self._session = None
        self._pending.clear()

    def revive(self) -> None:
        """Start another sidecar, which knows no submissions; the next `receive` connects to it."""
        self.die()
        self._alive = True
        self.refusal = None

    def refuse(self, reason: str) -> None:
        """Let the sidecar refuse the server."""
        self.refusal = reason
        self._session = None
        self._pending.clear()

    def reorder(self, seed: int = 0) -> None:
        """Shuffle the messages that are not delivered yet; the times of arrival stay."""
        shuffled = random.Random(seed).sample(self._pending, len(self._pending))
        self._pending = [
            replace(other, sent_at=pending.sent_at, arrives_at=pending.arrives_at)
            for pending, other in zip(self._pending, shuffled, strict=True)
        ]

    def duplicate(self) -> None:
        """Deliver each pending message twice."""
        self._pending = [pending for pending in self._pending for _ in range(2)]

    def inject(self, message: FromSidecar) -> None:
        """Let the sidecar send `message`, valid or not."""
        self.inject_frame(encode(message))

    def inject_frame(self, frame: bytes) -> None:
        """Let the sidecar send any bytes."""
        self._post(_InFlight(self._polls, self._polls + 1 + self.delay, frame))

    def _draft(self, submit: Submit) -> None:
        """Send the drafts of `submit` in pieces of `chunk` tokens."""
        for drafted in pieces(submit, self.script(submit), self.chunk, self.truncate_to):
            sent_at = self._polls + (drafted.start // self.chunk) * self.interval
            arrives_at = sent_at + 1 + self.delay
            self._post(_InFlight(sent_at, arrives_at, encode(drafted), submit.submission))

    def _forget(self, close: Close) -> None:
        """Stop drafting for a closed submission; messages that are sent already still arrive."""
        self._pending = [
            pending
            for pending in self._pending
            if pending.submission != close.submission or pending.sent_at <= self._polls
        ]

    def _post(self, pending: _InFlight) -> None:
        if self.drop_all:
            return
        bisect.insort(self._pending, pending, key=lambda other: other.arrives_at)
