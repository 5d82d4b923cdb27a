"""The server's end of the connection: a DEALER socket that the scheduler's thread polls.

It has no thread besides ZMQ's own: `receive` drives everything. Sends and receives do not block.
Errors of a peer are counted and never raised.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

import msgspec

from sglang_qspec.errors import LinkError
from sglang_qspec.link.address import check_connect
from sglang_qspec.link.dealer import Dealer
from sglang_qspec.link.faults import DROPPED, MALFORMED, Faults, quote
from sglang_qspec.link.frame import decode_from_sidecar, encode
from sglang_qspec.link.keys import Keys
from sglang_qspec.link.link import POLL_BUDGET_S, Delivery, LinkState
from sglang_qspec.link.listening import Listening
from sglang_qspec.link.window import Window
from sglang_qspec.messages import (
    MAX_FROM_SIDECAR_BYTES,
    PROTOCOL,
    Close,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    Heartbeat,
    Hello,
    Ping,
    Refusal,
    Submit,
    ToSidecar,
    Welcome,
    max_to_sidecar_bytes,
)

LOST_AFTER_S = 3.0
"""Silence, in seconds of listened time, after which a sidecar counts as lost."""
PING_INTERVAL_S = 1.0
"""Interval between Pings, in seconds."""
MAINTENANCE_INTERVAL_S = 0.02
"""Interval, in seconds, at which `receive` checks connection, handshake and liveness."""
HELLO_BACKOFF_S = (0.1, 2.0)
"""First and longest wait for the answer to a Hello, in seconds; the wait doubles each time."""
REOPEN_AFTER_S = 5.0
"""Listened time, in seconds, without a connection after which the socket is replaced. ZMQ
reconnects by itself, except after a peer that violated ZMQ's framing."""

WINDOW_BYTES = 128 << 20
"""Maximum number of sent bytes that the sidecar has not confirmed: about 30 million tokens."""

logger = logging.getLogger(__name__)


class SidecarLink:
    """A `Link` to a sidecar in another process. All calls come from one thread.

    The state follows from the messages received. While a session lasts, the sidecar has this
    server's submissions; the session ends with the connection.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        keys: Keys | None = None,
        *,
        lost_after_s: float = LOST_AFTER_S,
        ping_interval_s: float = PING_INTERVAL_S,
        maintenance_interval_s: float = MAINTENANCE_INTERVAL_S,
        reopen_after_s: float = REOPEN_AFTER_S,
        window_bytes: int = WINDOW_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to connect to `endpoint`; the sidecar may start later.

        `hello` describes the target. Times are in seconds. `window_bytes` limits the bytes that
        wait for a sidecar that does not read.
        Raises LinkError if `endpoint` is not allowed, or if no socket can be opened.
        """
        check_connect(endpoint, keys)
        self.endpoint = endpoint
        self._hello = hello
        self._lost_after_s = lost_after_s
        self._ping_interval_s = ping_interval_s
        self._maintenance_interval_s = maintenance_interval_s
        self._reopen_after_s = reopen_after_s
        self._clock = clock
        self.starved = False
        self._faults = Faults(logger, clock, owner=f"link to {endpoint}")
        self._listening = Listening(min(ping_interval_s, lost_after_s / 3), clock)
        self._window = Window(window_bytes)
        self._pings = 0
        self._hellos = 0
        self._answered_hello = 0

        self._session: str | None = None
        self.refusal: str | None = None
        self.session_count = 0
        self.sidecar: Welcome | None = None
        self.heartbeat: Heartbeat | None = None

        self._heard_at = 0.0  # in listened time
        self._connected_at = 0.0  # in listened time: when there last was a connection
        self._maintained_at = clock()
        self._next_maintenance = 0.0
        self._next_ping = 0.0
        self._next_hello = 0.0
        self._hello_wait_s = HELLO_BACKOFF_S[0]
        self._dealer: Dealer | None = Dealer(endpoint, keys)

    @property
    def state(self) -> LinkState:
        if self.refusal is not None:
            return LinkState.REFUSED
        if self._session is None:
            return LinkState.LOST if self.session_count else LinkState.CONNECTING
        silent_s = self._listening.seconds - self._heard_at
        return LinkState.LOST if silent_s > self._lost_after_s else LinkState.READY

    @property
    def dropped(self) -> int:
        return self._faults[DROPPED]

    @property
    def malformed(self) -> int:
        return self._faults[MALFORMED]

    def send(self, message: ToSidecar) -> Delivery:
        if self._session is None or self.refusal is not None:
            self._faults.note(DROPPED, f"the sidecar is {self.state.value}")
            return Delivery.LATER
        # A busy sidecar keeps our submissions, so a Close must reach it even while it is silent.
        if self.state is not LinkState.READY and not isinstance(message, Close):
            self._faults.note(DROPPED, "the sidecar is silent")
            return Delivery.LATER
        return self._send(message)

    def receive(self, limit: int = 256) -> list[FromSidecar]:
        dealer = self._dealer
        if dealer is None:
            return []
        received = self._drain(dealer, limit) if dealer.readable else []
        now = self._clock()
        if now >= self._next_maintenance:
            self._maintain(dealer, now)
        return received

    def close(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
        self._dealer = None
        self._session = None

    def _send(self, message: ToSidecar) -> Delivery:
        try:
            frame = encode(message, self._max_bytes)
        except LinkError as error:
            self._faults.note(MALFORMED, error)
            return Delivery.NEVER
        full = isinstance(message, Submit) and not self._window.fits(len(frame))
        if full or self._dealer is None or not self._dealer.send(frame):
            self._faults.note(DROPPED, "the queue to the sidecar is full")
            return Delivery.LATER
        self._window.sent(len(frame))
        return Delivery.TAKEN

    @property
    def _max_bytes(self) -> int:
        """Maximum size, in bytes, of a frame to the sidecar."""
        if self.sidecar is None:
            return MAX_FROM_SIDECAR_BYTES
        return max_to_sidecar_bytes(self.sidecar.context_len)

    def _ping(self) -> None:
        # The step is random, so a sidecar cannot answer a Ping that it has not read.
        self._pings += 1 + secrets.randbelow(1 << 20)
        if self._send(Ping(self._pings)):
            self._window.asked(self._pings)

    def _send_hello(self) -> bool:
        """Send a Hello with a new number; False if it was not queued."""
        self._hellos += 1
        hello = msgspec.structs.replace(self._hello, number=self._hellos)
        return bool(self._send(hello))

    def _drain(self, dealer: Dealer, limit: int) -> list[FromSidecar]:
        received: list[FromSidecar] = []
        until = self._clock() + POLL_BUDGET_S
        for _ in range(limit):
            frame = dealer.receive()
            if frame is None:
                break
            message = self._read(frame)
            if message is not None:
                received.append(message)
            if self._clock() >= until:
                break
        return received

    def _read(self, frame: bytes) -> FromSidecar | None:
        """Handle one frame; return its message if the caller must handle it."""
        try:
            message = decode_from_sidecar(frame, self._hello.vocab_size)
        except LinkError as error:
            self._faults.note(MALFORMED, error)
            return None
        match message:
            case Welcome() if not self._answers_hello(message.number):
                self._faults.note("Welcome that was not asked for", f"number {message.number}")
            case Welcome():
                self._on_welcome(message)
            case Refusal():
                self._refuse(quote(message.reason))
            case _ if self._session is None or self.refusal is not None:
                self._faults.note("message outside a session", type(message).__name__)
            case Heartbeat():
                self._heard()
                self.heartbeat = message
                self._window.answered(message.answers)
            case Drafted() | Gap() | Declined():
                self._heard()
                return message
        return None

    def _answers_hello(self, number: int) -> bool:
        """Whether `number` belongs to a Hello later than the last answered one.

        In a new session the server submits all its requests again. So a sidecar may open a session
        only in answer to a Hello.
        """
        if not self._answered_hello < number <= self._hellos:
            return False
        self._answered_hello = number
        return True

    def _on_welcome(self, welcome: Welcome) -> None:
        # The sidecar checks this too, but a mismatch would cost this server's drafts.
        if welcome.protocol != PROTOCOL:
            self._refuse(f"the sidecar speaks protocol {welcome.protocol}, not {PROTOCOL}")
            return
        self._heard()
        self.refusal = None
        self.sidecar = welcome
        if welcome.session != self._session:
            self._session = welcome.session
            self.session_count += 1
            if self._faults.is_due("ready"):
                logger.info(
                    "sidecar ready at %s: draft model %s, context %d, session %d",
                    self.endpoint,
                    quote(welcome.model),
                    welcome.context_len,
                    self.session_count,
                )

    def _refuse(self, reason: str) -> None:
        if self._faults.is_due("refusal"):
            logger.error(
                "the sidecar at %s refuses to draft for this server: %s", self.endpoint, reason
            )
        self.refusal = reason
        self._session = None

    def _heard(self) -> None:
        self._heard_at = self._listening.seconds
        self._hello_wait_s = HELLO_BACKOFF_S[0]

    def _maintain(self, dealer: Dealer, now: float) -> None:
        """Check the connection, and send a Hello or a Ping if one is due."""
        self._next_maintenance = now + self._maintenance_interval_s
        away_s = now - self._maintained_at
        self._maintained_at = now
        listened_s = self._listening.look(counts=not self.starved)
        was_ready = self.state is LinkState.READY

        change = dealer.watch()
        for failure in change.failures:
            self._faults.note("failed ZMQ handshake (are both ends' key files the same?)", failure)
        if change.lost:
            if self._session is not None and self._faults.is_due("lost connection"):
                logger.warning(
                    "the connection to the sidecar at %s is lost; decoding continues without its "
                    "drafts",
                    self.endpoint,
                )
            self._session = None
        if change.made:
            self._window.reset()
            self.refusal = None
            self._hello_wait_s = HELLO_BACKOFF_S[0]
            self._next_hello = now

        if not dealer.connected:
            if listened_s - self._connected_at > self._reopen_after_s:
                self._connected_at = listened_s
                dealer.reopen()
            return
        self._connected_at = listened_s
        if self.refusal is not None:
            return
        if was_ready and self.state is LinkState.READY:
            if away_s > self._lost_after_s:
                # The sidecar may have dropped the session meanwhile; its Welcome will show it.
                self._next_ping = now + self._ping_interval_s
                self._send_hello()
            elif now >= self._next_ping:
                self._next_ping = now + self._ping_interval_s
                self._ping()
            return
        if now >= self._next_hello and self._send_hello():
            if self._session is not None:
                self._faults.note("silent sidecar", f"for {self._lost_after_s:g} s or more")
            self._next_hello = now + self._hello_wait_s
            self._hello_wait_s = min(2 * self._hello_wait_s, HELLO_BACKOFF_S[1])
