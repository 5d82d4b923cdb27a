"""The sidecar's end of the connection: a ROUTER socket that serves several servers.

All calls come from one thread, which polls `receive` between the steps of its own work.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from sglang_qspec.errors import LinkError
from sglang_qspec.link.address import check_bind
from sglang_qspec.link.authenticator import Authenticator
from sglang_qspec.link.connections import Connections
from sglang_qspec.link.faults import DROPPED, MALFORMED, Faults
from sglang_qspec.link.frame import decode_to_sidecar, encode
from sglang_qspec.link.keys import Keys
from sglang_qspec.link.listening import Listening
from sglang_qspec.messages import (
    MAX_LENGTH,
    PROTOCOL,
    FromSidecar,
    Heartbeat,
    Hello,
    Ping,
    Refusal,
    ToSidecar,
    Welcome,
    max_to_sidecar_bytes,
)

FORGET_AFTER_S = 10.0
"""Silence, in seconds of listened time, after which a server counts as gone."""
SEND_QUEUE = 16384
"""Maximum number of messages queued for one slow server."""
RECEIVE_QUEUE = (64, 1024)
"""Bounds of the receive queue of one server in messages; further messages wait at the server."""
RECEIVE_QUEUE_BYTES = 64 << 20
"""Approximate limit of the receive queue in bytes, if all messages have the maximum size."""
RECEIVE_BUDGET_S = 0.01
"""Time, in seconds, after which `receive` reads no further message. ZMQ reads one message of each
server in turn, so a busy server delays each message of another server by one message."""
HEARTBEAT_S = 0.2
"""Listened time, in seconds, for which the same Heartbeat answers the Pings of all servers."""
MAX_PEERS = 256
"""Maximum number of servers."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Peer:
    """Session of one server, from its Hello until it is gone. A returning server is a new Peer."""

    session: str
    routing_id: bytes
    vocab_size: int = MAX_LENGTH
    """Number of token ids of its target, from its first Hello; drafts have only ids below it."""

    def __str__(self) -> str:
        return self.session


class LinkServer:
    """Owns the socket and the sessions of the connected servers.

    Submissions belong to a `Peer`; the caller drops them when `departed` returns the peer.
    """

    def __init__(
        self,
        endpoint: str,
        welcome: Welcome,
        fingerprint: str,
        heartbeat: Callable[[], Heartbeat],
        keys: Keys | None = None,
        *,
        head: str = "",
        forget_after_s: float = FORGET_AFTER_S,
        send_queue: int = SEND_QUEUE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind `endpoint`.

        `welcome` and `fingerprint` describe the draft model and its tokenizer, and `head` is the
        digest of the head that runs here, empty for none. `heartbeat` is called for each Ping.
        `forget_after_s` is in seconds, `send_queue` in messages.

        Raises LinkError if `endpoint` is not allowed or cannot be bound.
        """
        check_bind(endpoint, keys)
        self._welcome = welcome
        self._max_bytes = max_to_sidecar_bytes(welcome.context_len)
        self._fingerprint = fingerprint
        self._head = head
        self._heartbeat = heartbeat
        self._latest_heartbeat: Heartbeat | None = None
        self._next_heartbeat = 0.0
        self._forget_after_s = forget_after_s
        self._faults = Faults(logger, clock)
        self._note_malformed = partial(self._faults.note, MALFORMED)
        self._listening = Listening(1.0, clock)
        self._peers: dict[bytes, Peer] = {}
        self._heard_at: dict[bytes, float] = {}  # in listened time
        self._departed: list[Peer] = []

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        # Report a full queue (EAGAIN) and a disconnected peer, instead of dropping messages
        # silently.
        self._router.router_mandatory = 1
        self._router.sndhwm = send_queue
        fewest, most = RECEIVE_QUEUE
        self._router.rcvhwm = max(fewest, min(most, RECEIVE_QUEUE_BYTES // self._max_bytes))
        self._router.setsockopt(zmq.MAXMSGSIZE, self._max_bytes)
        self._router.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._connections = Connections(self._context, self._router)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._connections.socket, zmq.POLLIN)
        self._authenticator: Authenticator | None = None
        if keys is not None:
            self._authenticator = Authenticator(self._context, keys)
            self._authenticator.protect(self._router)
            self._poller.register(self._authenticator.socket, zmq.POLLIN)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"the endpoint is {endpoint!r}, but cannot be bound: {error}") from None
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        """Bound address, with the actual port for `tcp://HOST:*`."""

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The servers with a session."""
        return tuple(self._peers.values())

    @property
    def dropped(self) -> int:
        """Number of messages dropped because of a full queue or a disconnected server."""
        return self._faults[DROPPED]

    @property
    def malformed(self) -> int:
        """Number of messages dropped because they violate the protocol."""
        return self._faults[MALFORMED]

    @property
    def unserved(self) -> int:
        """Number of messages dropped because their sender has no session."""
        return self._faults["message of an unknown server"]

    def receive(self, timeout_ms: int, limit: int = 1024) -> list[tuple[Peer, ToSidecar]]:
        """Wait at most `timeout_ms` (0: not at all) for messages, and read at most `limit`.

        It stops reading after RECEIVE_BUDGET_S, so that messages cannot stop the drafting. It
        answers Hello and Ping messages itself and does not return them.
        """
        began = time.monotonic()
        ready = dict(self._poller.poll(timeout_ms))
        now = self._listening.look(waited_s=time.monotonic() - began)
        authenticator = self._authenticator
        if authenticator and authenticator.socket in ready and authenticator.answer():
            self._faults.note("rejected key", "a server with another key tried to connect")
        if self._connections.socket in ready and (closed := self._connections.look()):
            self._faults.note(
                "closed connections", f"{closed} without a server: over {self._connections.limit}"
            )
        received: list[tuple[Peer, ToSidecar]] = []
        until = time.monotonic() + RECEIVE_BUDGET_S
        for _ in range(limit):
            try:
                frames = self._connections.receive()
            except zmq.Again:
                # Only now have all queued messages been read.
                self._forget_silent(now)
                break
            item = self._read(frames, now)
            if item is not None:
                received.append(item)
            if time.monotonic() >= until:
                # Unread messages of a silent server may be queued. But ZMQ reads from all servers
                # in turn, so a server that is silent for three times the limit is gone.
                self._forget_silent(now - 2 * self._forget_after_s)
                break
        return received

    def departed(self) -> list[Peer]:
        """Return the servers that have gone since the last call."""
        departed, self._departed = self._departed, []
        return departed

    def send(self, peer: Peer, message: FromSidecar) -> bool:
        """Queue a message without waiting; False if the queue is full or `peer` has gone."""
        if self._peers.get(peer.routing_id) != peer:
            self._faults.note(DROPPED, f"server {peer} has gone")
            return False
        return self._send(peer.routing_id, message)

    def close(self) -> None:
        """Drop queued messages and close the socket. May be called twice."""
        self._connections.close()
        self._router.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()

    def _send(self, routing_id: bytes, message: FromSidecar) -> bool:
        try:
            self._router.send_multipart([routing_id, encode(message)], zmq.NOBLOCK)
        except LinkError as error:
            self._note_malformed(error)
        except zmq.Again:
            self._faults.note(DROPPED, "a server's queue is full")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._faults.note(DROPPED, "a server has disconnected")
            self._depart(routing_id)
        else:
            return True
        return False

    def _read(self, frames: list[bytes], now: float) -> tuple[Peer, ToSidecar] | None:
        """Handle one message; return its sender and the message if the caller must handle it."""
        routing_id = frames[0]
        try:
            if len(frames) != 2:
                raise LinkError(f"a message has one frame, but this one has {len(frames) - 1}")
            message = decode_to_sidecar(
                frames[1], self._welcome.vocab_size, self._note_malformed, self._max_bytes
            )
        except LinkError as error:
            self._note_malformed(error)
            return None
        if isinstance(message, Hello):
            self._on_hello(routing_id, message, now)
            return None
        peer = self._peers.get(routing_id)
        if peer is None:
            self._faults.note("message of an unknown server", type(message).__name__)
            return None
        self._heard_at[routing_id] = now
        if isinstance(message, Ping):
            if self._latest_heartbeat is None or now >= self._next_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_S
                self._latest_heartbeat = self._heartbeat()
            answer = msgspec.structs.replace(self._latest_heartbeat, answers=message.number)
            self._send(routing_id, answer)
            return None
        return peer, message

    def _on_hello(self, routing_id: bytes, hello: Hello, now: float) -> None:
        reason = self._objection(hello)
        if reason is None and routing_id not in self._peers and len(self._peers) >= MAX_PEERS:
            reason = f"this sidecar serves {MAX_PEERS} servers already"
        if reason is not None:
            self._depart(routing_id)
            self._faults.note("refused server", reason)
            self._send(routing_id, Refusal(reason))
            return
        if routing_id not in self._peers:
            self._peers[routing_id] = Peer(secrets.token_hex(8), routing_id, hello.vocab_size)
            if self._faults.is_due("arrival"):
                logger.info("server %s has connected", self._peers[routing_id])
        self._connections.keep(routing_id)
        self._heard_at[routing_id] = now
        welcome = msgspec.structs.replace(
            self._welcome, session=self._peers[routing_id].session, number=hello.number
        )
        self._send(routing_id, welcome)

    def _objection(self, hello: Hello) -> str | None:
        """Why the sidecar refuses this server; None if it accepts it."""
        if hello.protocol != PROTOCOL:
            return (
                f"the server speaks protocol {hello.protocol} and the sidecar {PROTOCOL}: "
                "install the same release of sglang-qspec on both sides"
            )
        if hello.fingerprint != self._fingerprint:
            return (
                f"the target's tokenizer differs from the tokenizer of the draft model "
                f"{self._welcome.model}: the same token ids would mean different text. To learn "
                "the first token that differs, start the server with this draft model instead of "
                "an endpoint (--speculative-draft-model-path)"
            )
        if hello.head == self._head:
            return None
        if not self._head:
            return (
                "the server has a head (--speculative-qspec-head-path), but this sidecar runs "
                "none: start it with --model-path HEAD --target-path TARGET"
            )
        if not hello.head:
            return (
                f"this sidecar runs the head {self._welcome.model}, so the server needs the same "
                "one (--speculative-qspec-head-path)"
            )
        return f"this sidecar runs another head than that of the server, {self._welcome.model}"

    def _forget_silent(self, now: float) -> None:
        for routing_id, heard_at in list(self._heard_at.items()):
            if now - heard_at > self._forget_after_s:
                self._depart(routing_id)

    def _depart(self, routing_id: bytes) -> None:
        self._connections.release(routing_id)
        peer = self._peers.pop(routing_id, None)
        if peer is not None:
            del self._heard_at[routing_id]
            self._departed.append(peer)
            if self._faults.is_due("departure"):
                logger.info("server %s has gone", peer)
