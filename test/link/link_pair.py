"""A link and its sidecar's end, with one interface for the fake and the real link."""

from __future__ import annotations

from typing import Protocol

from sglang_qspec.link import FakeSidecarLink, Link, LinkServer, LinkState
from sglang_qspec.link.fake import Script, pieces
from sglang_qspec.messages import Close, FromSidecar, Submit
from test.link.wire import VOCAB_SIZE, Wire, until

CHUNK = 2


class LinkPair(Protocol):
    closes: list[Close]

    @property
    def link(self) -> Link: ...

    def serve(self) -> None:
        """One poll of the sidecar."""
        ...

    def step(self) -> list[FromSidecar]:
        """One poll of each side; returns the messages that the link received."""
        ...

    def inject(self, message: FromSidecar) -> None: ...

    def die(self) -> None: ...

    def revive(self) -> None: ...

    def refuse(self) -> None:
        """Replace the sidecar by one that does not fit the server."""
        ...


class FakeLinkPair:
    def __init__(self, script: Script) -> None:
        self.link = FakeSidecarLink(script, vocab_size=VOCAB_SIZE, chunk=CHUNK)
        self.closes = self.link.closes

    def serve(self) -> None:
        """The fake acts in `receive`."""

    def step(self) -> list[FromSidecar]:
        return self.link.receive()

    def inject(self, message: FromSidecar) -> None:
        self.link.inject(message)

    def die(self) -> None:
        self.link.die()

    def revive(self) -> None:
        self.link.revive()

    def refuse(self) -> None:
        self.link.refuse("the tokenizer differs")


class WireLinkPair:
    """A real link to a `LinkServer` that sends the script's completions."""

    def __init__(self, wire: Wire, script: Script) -> None:
        self.closes: list[Close] = []
        self._wire = wire
        self._script = script
        self._server: LinkServer | None = wire.serve()
        self.link = wire.link()

    def step(self) -> list[FromSidecar]:
        self.serve()
        return self.link.receive()

    def serve(self) -> None:
        if self._server is None:
            return
        for peer, message in self._server.receive(0):
            if isinstance(message, Close):
                self.closes.append(message)
            elif isinstance(message, Submit):
                for drafted in pieces(message, self._script(message), CHUNK):
                    assert self._server.send(peer, drafted)

    def inject(self, message: FromSidecar) -> None:
        assert self._server is not None
        (peer,) = self._server.peers
        assert self._server.send(peer, message)

    def die(self) -> None:
        assert self._server is not None
        self._server.close()
        self._server = None

    def revive(self) -> None:
        if self._server is not None:
            self.die()
        self._server = self._wire.serve()

    def refuse(self) -> None:
        self.die()
        self._server = self._wire.serve(fingerprint="another")


def ready(pair: LinkPair) -> None:
    until(lambda: pair.link.state is LinkState.READY, pair.step)


def collect(pair: LinkPair, count: int) -> list[FromSidecar]:
    """Poll until the link has received `count` messages; returns them."""
    received: list[FromSidecar] = []
    until(lambda: len(received) >= count, lambda: received.extend(pair.step()))
    return received
