"""The start waits for the sidecars at all endpoints, and a refusal of any of them stops it."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sglang_qspec.engine.sidecar import startup
from sglang_qspec.errors import LinkError
from sglang_qspec.link import LinkServer, LinkState, PrivateEndpoint, SidecarLink
from sglang_qspec.messages import PROTOCOL, Heartbeat, Hello, Welcome

LONG_S = 60.0
"""More seconds than two sidecars need to answer on a busy machine."""
CONNECT = functools.partial(SidecarLink, hello=Hello(PROTOCOL, 10, "ours"))


@contextlib.contextmanager
def answering(endpoint: str, fingerprint: str) -> Iterator[None]:
    """A context in which a sidecar with this tokenizer answers at the endpoint."""
    stop = threading.Event()

    def serve() -> None:
        welcome = Welcome(PROTOCOL, "m", 10, 64)
        server = LinkServer(endpoint, welcome, fingerprint, lambda: Heartbeat(0, 0, 0, 0))
        while not stop.is_set():
            server.receive(5)
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def endpoints() -> Iterator[list[str]]:
    with PrivateEndpoint() as private:
        yield [f"{private.address}{number}" for number in range(3)]


def test_an_absent_sidecar_is_named_and_joins_later(
    endpoints: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[SidecarLink] = []

    def connect(endpoint: str) -> SidecarLink:
        opened.append(CONNECT(endpoint))
        return opened[-1]

    def seconds() -> float:
        """The time of the start is over once both sidecars have answered, however slow they are."""
        answered = sum(link.state is LinkState.READY for link in opened)
        return startup.HANDSHAKE_SECONDS if answered == 2 or time.monotonic() > limit else 0.0

    limit = time.monotonic() + LONG_S
    clock = SimpleNamespace(monotonic=seconds, sleep=time.sleep)
    monkeypatch.setattr(startup, "time", clock)
    with answering(endpoints[0], "ours"), answering(endpoints[2], "ours"):
        links = startup._join(endpoints, connect)
    assert [link.endpoint for link in links] == endpoints
    states = [link.state for link in links]
    assert states == [LinkState.READY, LinkState.CONNECTING, LinkState.READY]
    absent = [
        endpoint for endpoint in endpoints if f"No sidecar answers at {endpoint};" in caplog.text
    ]
    assert absent == [endpoints[1]]
    for link in links:
        link.close()


def test_a_refusal_by_any_sidecar_stops_the_start_and_names_it(
    endpoints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "HANDSHAKE_SECONDS", LONG_S)
    with (
        answering(endpoints[0], "ours"),
        answering(endpoints[1], "another"),
        pytest.raises(LinkError, match=f"has '{endpoints[1]}', but its sidecar refuses"),
    ):
        startup._join(endpoints[:2], CONNECT)
