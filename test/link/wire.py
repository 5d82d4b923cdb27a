"""Real ends of a link in one process, stepped by the test, and a clock that the test advances."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_qspec.link import Keys, LinkServer, PrivateEndpoint, SidecarLink
from sglang_qspec.messages import PROTOCOL, Heartbeat, Hello, Welcome

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
    ) -> LinkServer:
        server = LinkServer(
            self.endpoint,
            Welcome(PROTOCOL, "tiny draft", vocab_size, context_len=64),
            fingerprint,
            lambda: Heartbeat(requests=3, rows=2, drafted_tokens=1, dropped_messages=0),
            self.keys,
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
    ) -> SidecarLink:
        link = SidecarLink(
            endpoint or self.endpoint,
            Hello(protocol, vocab_size, fingerprint),
            self.keys,
            lost_after_s=lost_after_s,
            ping_interval_s=0.05,
            turn_interval_s=0.001,
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


@contextmanager
def open_wire(transport: str, key_file: Keys) -> Iterator[Wire]:
    """A private ipc endpoint, or a TCP port on this host with a key file."""
    if transport == "tcp":
        wire = Wire("tcp://127.0.0.1:*", key_file)
        try:
            yield wire
        finally:
            wire.close()
        return
    with PrivateEndpoint() as private:
        wire = Wire(private.address)
        try:
            yield wire
        finally:
            wire.close()
