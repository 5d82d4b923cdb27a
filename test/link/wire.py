"""Real ends of a link in one process, stepped by the test, and a clock that the test advances."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import zmq

from sglang_qspec.link import Keys, LinkServer, LinkState, PrivateEndpoint, SidecarLink
from sglang_qspec.messages import PROTOCOL, FromSidecar, Heartbeat, Hello, Welcome
from test.link.sockets import router, waiting

DEADLINE_S = 60.0
VOCAB_SIZE = 100
FINGERPRINT = "f" * 64


class Clock:
    """Real time plus the seconds that the test adds."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.step_s = 0.0
        """Seconds added at every reading of the clock."""

    def __call__(self) -> float:
        self.ahead_s += self.step_s
        return time.monotonic() + self.ahead_s


class Wire:
    """Opens servers and links at one endpoint, steps them, and closes them at the end."""

    def __init__(self, endpoint: str, key_file: Keys | None = None) -> None:
        self.endpoint = endpoint
        self.keys = key_file
        self.clock = Clock()
        self._open: list[LinkServer | SidecarLink] = []

    def serve(
        self,
        vocab_size: int = VOCAB_SIZE,
        fingerprint: str = FINGERPRINT,
        send_queue: int = 1000,
        forget_after_s: float = 10.0,
        head: str = "",
    ) -> LinkServer:
        server = LinkServer(
            self.endpoint,
            Welcome(PROTOCOL, "tiny draft", vocab_size, context_len=64),
            fingerprint,
            lambda: Heartbeat(requests=3, rows=2, drafted_tokens=1, dropped_messages=0),
            self.keys,
            head=head,
            send_queue=send_queue,
            forget_after_s=forget_after_s,
            clock=self.clock,
        )
        # Links and later servers use the port that ZMQ chose.
        self.endpoint = server.endpoint
        self._open.append(server)
        return server

    def link(
        self,
        protocol: int = PROTOCOL,
        vocab_size: int = VOCAB_SIZE,
        fingerprint: str = FINGERPRINT,
        lost_after_s: float = 3.0,
        reopen_after_s: float = 5.0,
        window_bytes: int = 128 << 20,
        endpoint: str | None = None,
        head: str = "",
    ) -> SidecarLink:
        link = SidecarLink(
            endpoint or self.endpoint,
            Hello(protocol, vocab_size, fingerprint, head=head),
            self.keys,
            lost_after_s=lost_after_s,
            ping_interval_s=0.05,
            maintenance_interval_s=0.001,
            reopen_after_s=reopen_after_s,
            window_bytes=window_bytes,
            clock=self.clock,
        )
        self._open.append(link)
        return link

    def close(self) -> None:
        for end in self._open:
            end.close()


def until(holds: Callable[[], object], *steps: Callable[[], object]) -> None:
    """Take the steps until `holds` is true; fails after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        for step in steps:
            step()
        time.sleep(0.0005)


def ready(link: SidecarLink, server: LinkServer) -> None:
    """Connect the link to the server."""
    until(lambda: link.state is LinkState.READY, link.receive, lambda: server.receive(0))


def received(link: SidecarLink, count: int = 1, limit: int = 256) -> list[FromSidecar]:
    """Poll until the link has received `count` messages; returns them."""
    messages: list[FromSidecar] = []
    until(lambda: len(messages) >= count, lambda: messages.extend(link.receive(limit)))
    return messages


class BareSidecar:
    """The ZMQ socket of a sidecar with one link; it sends only what the test sends."""

    def __init__(self, socket: zmq.Socket[bytes], link: SidecarLink) -> None:
        self.link = link
        self.peer = b""
        """Routing id of the link's latest connection."""
        self.frames: list[bytes] = []
        """All frames from the link."""
        self._socket = socket

    def read(self) -> None:
        """Read the frames that have arrived."""
        for peer, frame in waiting(self._socket):
            self.peer = peer
            self.frames.append(frame)

    def send(self, *messages: FromSidecar | bytes) -> None:
        """Send messages, or frames of any bytes."""
        for message in messages:
            frame = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
            self._socket.send_multipart([self.peer, frame])


@contextmanager
def bare_sidecar(wire: Wire, reopen_after_s: float = 5.0) -> Iterator[BareSidecar]:
    """A sidecar that has the first Hello of a link."""
    with router(wire.endpoint, wire.keys) as (socket, endpoint):
        sidecar = BareSidecar(socket, wire.link(endpoint=endpoint, reopen_after_s=reopen_after_s))
        until(lambda: sidecar.frames, sidecar.link.receive, sidecar.read)
        yield sidecar


@contextmanager
def open_wire(transport: str, key_file: Keys) -> Iterator[Wire]:
    """A private ipc endpoint, or a TCP port on this host with a key file."""
    with ExitStack() as stack:
        if transport == "tcp":
            wire = Wire("tcp://127.0.0.1:*", key_file)
        else:
            wire = Wire(stack.enter_context(PrivateEndpoint()).address)
        stack.callback(wire.close)
        yield wire
