"""The start waits for the sidecars at all endpoints, and a refusal of any of them stops it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import pytest

from sglang_qspec.engine.sidecar import startup
from sglang_qspec.errors import LinkError
from sglang_qspec.link import LinkServer, LinkState, PrivateEndpoint, SidecarLink
from sglang_qspec.messages import PROTOCOL, Heartbeat, Hello, Welcome

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
    monkeypatch.setattr(startup, "HANDSHAKE_SECONDS", 0.5)
    with answering(endpoints[0], "ours"), answering(endpoints[2], "ours"):
        links = startup._join(endpoints, CONNECT)
    assert [link.endpoint for link in links] == endpoints
    states = [link.state for link in links]
    assert states == [LinkState.READY, LinkState.CONNECTING, LinkState.READY]
    assert f"No sidecar answers at {endpoints[1]}" in caplog.text
    assert endpoints[0] not in caplog.text
    for link in links:
        link.close()


def test_a_refusal_by_any_sidecar_stops_the_start_and_names_it(endpoints: list[str]) -> None:
    with (
        answering(endpoints[0], "ours"),
        answering(endpoints[1], "another"),
        pytest.raises(LinkError, match=f"has '{endpoints[1]}', but its sidecar refuses"),
    ):
        startup._join(endpoints[:2], CONNECT)
