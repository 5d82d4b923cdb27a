"""Limits the open connections of the sidecar's socket.

ZMQ accepts every connection, and each takes a file descriptor. When no descriptor is free, ZMQ's
thread retries without a pause on tcp, and aborts the process on ipc. When more connections than a
limit are open, `Connections` therefore closes connections that serve no server.

It chooses them at random: among n connections, a server that has just connected loses its own with
a probability of 1/n, and connects again. If it closed the oldest connections first, a fast flood
would end every connection before its handshake is complete.

Between two calls of `look` ZMQ accepts at most 1001 connections: its monitor queue holds this
number of events, and ZMQ's thread waits while the queue is full.
"""

from __future__ import annotations

import random
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_qspec.link import descriptors
from sglang_qspec.link.disconnector import Disconnector

HANDSHAKE_S = 5.0
"""Maximum duration of a handshake, after which ZMQ closes the connection. It is longer than a pass
of the draft model, because the sidecar answers authentication requests between two passes."""
MAX_CONNECTIONS = 512
"""Maximum number of open connections: twice the maximum number of servers of a sidecar."""

_MONITOR = "inproc://connections"
# Not ACCEPT_FAILED: without a free descriptor ZMQ sends it over and over.
_WATCHED = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
_CLOSE_S = 1.0
"""Maximum wait for ZMQ's thread to stop listening."""


class Connections:
    """Tracks the open connections of a ROUTER socket, and reads its messages.

    It has no thread: the owner calls `look` when `socket` is readable.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes]) -> None:
        """Watch `router`, which must not be bound yet."""
        self.limit = min(MAX_CONNECTIONS, descriptors.spare())
        """Maximum number of open connections."""
        self._router = router
        self._open: set[int] = set()
        """File descriptors of the open connections, except those that are being closed."""
        self._kept: dict[bytes, int] = {}
        """File descriptor of each connection that serves a server, by routing id."""
        self._latest: tuple[bytes, int] | None = None
        """Routing id and file descriptor of the latest message on a connection that is not in
        `_kept`; None before the first."""
        self._disconnector = Disconnector()
        router.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        router.monitor(_MONITOR, _WATCHED)
        self.socket = context.socket(zmq.PAIR)
        # ZMQ adds the sender's limit, which is 1000 and cannot be set.
        self.socket.rcvhwm = 1
        self.socket.connect(_MONITOR)

    @property
    def count(self) -> int:
        """Number of open connections at the last `look`."""
        return len(self._open)

    def receive(self) -> list[bytes]:
        """Return the frames of the next message, routing id first; zmq.Again if there is none."""
        routing_id = self._router.recv(zmq.NOBLOCK)
        if routing_id in self._kept:
            return [routing_id, *self._router.recv_multipart(zmq.NOBLOCK)]
        # Only an uncopied frame gives its connection's descriptor; reading one takes 4 us longer.
        frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        self._latest = routing_id, int(frames[0].get(zmq.SRCFD))
        return [routing_id, *(frame.bytes for frame in frames)]

    def keep(self, routing_id: bytes) -> None:
        """Protect the connection of the latest message, because its server has a session."""
        if self._latest is None or self._latest[0] != routing_id:
            return
        descriptor = self._latest[1]
        # An unread event may concern an earlier connection with the same descriptor.
        self._read_events()
        if descriptor in self._open:
            self._kept[routing_id] = descriptor

    def release(self, routing_id: bytes) -> None:
        """End the protection of the connection, because its server has no session."""
        self._kept.pop(routing_id, None)

    def look(self) -> int:
        """Read connection events, close connections over the limit, and return their number."""
        self._read_events()
        surplus = self.count - self.limit
        if surplus <= 0:
            return 0
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        unserved = sorted(self._open.difference(self._kept.values()))
        chosen = random.sample(unserved, min(surplus, len(unserved)))
        for descriptor in chosen:
            self._open.remove(descriptor)
            self._disconnector.end(descriptor, endpoint)
        return len(chosen)

    def close(self) -> None:
        """Stop listening and watching. May be called twice."""
        if self.socket.closed:
            return
        if endpoint := self._router.getsockopt_string(zmq.LAST_ENDPOINT):
            # The monitor cannot be disabled while ZMQ's thread waits for room in its queue.
            self._router.unbind(endpoint)
            deadline = time.monotonic() + _CLOSE_S
            while not self._read_events() and time.monotonic() < deadline:
                self.socket.poll(10)
        self._router.disable_monitor()
        self.socket.close(linger=0)
        self._disconnector.close()

    def _read_events(self) -> bool:
        """Read all monitor events; return whether ZMQ has stopped listening."""
        stopped = False
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.socket, zmq.NOBLOCK)
            descriptor = event["value"]
            if event["event"] == zmq.Event.ACCEPTED:
                self._open.add(descriptor)
            elif event["event"] == zmq.Event.DISCONNECTED:
                self._open.discard(descriptor)
                self._kept = {name: kept for name, kept in self._kept.items() if kept != descriptor}
            else:
                stopped = True
        return stopped
