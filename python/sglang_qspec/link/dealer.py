"""The server's DEALER socket, with a monitor that shows whether it is connected."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_qspec.errors import LinkError
from sglang_qspec.link.keys import Keys
from sglang_qspec.messages import MAX_FROM_SIDECAR_BYTES

SEND_QUEUE = 8192
"""Maximum number of messages queued for a slow sidecar; a burst of arrivals must fit."""
RECEIVE_QUEUE = 4096
"""Maximum number of messages queued for a busy scheduler; further messages wait at the sidecar. A
typical Drafted takes 100 bytes and no frame takes more than MAX_FROM_SIDECAR_BYTES, so the queue
takes at most 256 MiB."""
RECONNECT_MS = (50, 1000)
"""First and longest wait between attempts to connect, in ms."""
PULSE_MS = (2000, 15000)
"""Interval of ZMQ's own heartbeat, and the silence after which ZMQ closes the connection, in ms. It
detects vanished hosts. The peer's io thread answers it even while its process is busy."""
CLOSE_S = 0.1
"""Maximum wait for ZMQ's thread to end, in seconds."""

# Plain integers, because arithmetic on ZMQ's enums takes the same time as a poll of the socket.
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)

_FAILURES = int(
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED) | _FAILURES


@dataclass(frozen=True)
class Change:
    """Changes of the connection since the last `watch`."""

    lost: bool
    """Whether a connection ended; messages queued on it are gone."""
    made: bool
    """Whether there is a new connection."""
    failures: tuple[str, ...]
    """Names of the ZMQ events of failed handshakes."""


class Dealer:
    """Owns the socket, its context and its monitor."""

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        """Begin to connect. Raises LinkError if the system has no room for the socket."""
        self._endpoint = endpoint
        self._keys = keys
        self.connected = False
        try:
            self._context = zmq.Context()
            self._open()
        except zmq.ZMQError as error:
            raise LinkError(
                f"cannot open a socket for the endpoint {endpoint!r}: {error}"
            ) from None

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False if the queue is full or there is no connection."""
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def readable(self) -> bool:
        """Whether a frame waits. An empty `receive` costs more, because it handles an exception."""
        return bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)

    def receive(self) -> bytes | None:
        """Return the next frame, or None. Each frame of a multipart message counts as a message."""
        try:
            return self._socket.recv(_NOBLOCK)
        except zmq.Again:
            return None

    def watch(self) -> Change:
        """Read the events of the monitor, and update `connected`."""
        lost = made = False
        failures = []
        while int(self._monitor.getsockopt(_EVENTS)) & _READABLE:
            event = recv_monitor_message(self._monitor, _NOBLOCK)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                made = self.connected = True
            elif event == zmq.Event.DISCONNECTED:
                lost, made, self.connected = True, False, False
            elif event & _FAILURES:
                failures.append(zmq.Event(event).name or str(event))
        return Change(lost, made, tuple(failures))

    def reopen(self) -> None:
        """Replace the socket, after ZMQ has stopped reconnecting it."""
        self._shut()
        self._open()

    def close(self) -> None:
        """Close the socket. ZMQ's thread may end later, because it may wait for a name server."""
        self._shut()
        ending = threading.Thread(target=self._context.term, daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def _open(self) -> None:
        self.connected = False
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        # Queue nothing while disconnected, so that a new sidecar gets no stale messages.
        self._socket.immediate = 1
        self._socket.sndhwm = SEND_QUEUE
        self._socket.rcvhwm = RECEIVE_QUEUE
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FROM_SIDECAR_BYTES)
        self._socket.setsockopt(zmq.IPV6, int("[" in self._endpoint))
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = RECONNECT_MS
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = PULSE_MS
        if self._keys is not None:
            self._socket.curve_serverkey = self._keys.sidecar_public.encode("ascii")
            self._socket.curve_publickey = self._keys.server_public.encode("ascii")
            self._socket.curve_secretkey = self._keys.server_secret.encode("ascii")
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._socket.connect(self._endpoint)

    def _shut(self) -> None:
        self._socket.disable_monitor()
        # `term` would wait for an open socket.
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
