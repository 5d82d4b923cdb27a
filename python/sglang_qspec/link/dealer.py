"""A DEALER socket with its monitor: frames in, frames out, and whether anybody is connected."""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_qspec.link.keys import Keys
from sglang_qspec.messages import MAX_FROM_SIDECAR_BYTES

SEND_QUEUE = 8192
"""Messages waiting for a slow sidecar, at most; a burst of arrivals must fit."""
RECEIVE_QUEUE = 4096
"""Messages waiting for a busy scheduler, at most; a draft's chunk takes about 100 bytes, and no
frame more than MAX_FROM_SIDECAR_BYTES, so that the queue takes 256 MiB at the very most. What does
not fit waits at the sidecar."""
RECONNECT_MS = (50, 1000)
"""First and longest wait between attempts to connect."""
PULSE_MS = (2000, 15000)
"""ZMQ's own heartbeat, answered by the other process's io thread even while that process is busy:
interval, and the silence after which the connection is closed. Finds hosts that vanished."""

# Plain integers: arithmetic on ZMQ's enums costs as much as a whole look at the socket.
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
    """What happened to the connection since the last look."""

    lost: bool
    """A connection ended; what was queued on it is gone."""
    made: bool
    """There is a new connection."""
    failures: tuple[str, ...]
    """Attempts that failed in ZMQ's handshake, by the name of ZMQ's event."""


class Dealer:
    """Owns the socket, its context and its monitor."""

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._context = zmq.Context()
        self.connected = False
        self._open()

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False when the queue is full or nobody is connected."""
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def readable(self) -> bool:
        """Whether a frame waits. Cheaper than a `receive` in vain, which is an exception inside."""
        return bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)

    def receive(self) -> bytes | None:
        """The next frame, or None. A message of several frames, which no sidecar sends, is read
        as so many messages."""
        try:
            return self._socket.recv(_NOBLOCK)
        except zmq.Again:
            return None

    def watch(self) -> Change:
        """Read what the monitor saw, and update `connected`."""
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
        """A new socket, where ZMQ gave the old one's connection up."""
        self._shut()
        self._open()

    def close(self) -> None:
        self._shut()
        self._context.term()

    def _open(self) -> None:
        self.connected = False
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        # Nothing queues up for a sidecar that is not there, to surprise the next one.
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
        # A socket left open would have `term` wait for it.
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
