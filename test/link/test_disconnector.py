"""The disconnector ends only connections of the endpoint, even if a descriptor was reused."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from sglang_qspec.link.disconnector import Disconnector
from test.link.sockets import closed


@pytest.fixture
def disconnector() -> Iterator[Disconnector]:
    disconnector = Disconnector()
    yield disconnector
    disconnector.close()


def _connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection, the accepted one first."""
    peer = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    return accepted, peer


def test_an_accepted_connection_ends_and_its_descriptor_stays_open(
    disconnector: Disconnector,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted, peer = _connect(listener)
        endpoint = f"tcp://0.0.0.0:{listener.getsockname()[1]}"
        with accepted, peer:
            assert not closed(peer)
            assert disconnector.end(accepted.fileno(), endpoint)
            assert closed(peer)
            os.fstat(accepted.fileno())
            assert accepted.recv(1) == b""


def test_descriptors_that_are_no_connection_of_the_endpoint_stay_open(
    disconnector: Disconnector,
) -> None:
    one, other = socket.socketpair()
    reader, writer = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener, one, other:
        accepted, peer = _connect(listener)
        port = listener.getsockname()[1]
        with accepted, peer:
            for descriptor, endpoint in (
                (one.fileno(), f"tcp://127.0.0.1:{port}"),
                (one.fileno(), "ipc:///tmp/other"),
                (writer, f"tcp://127.0.0.1:{port}"),
                (peer.fileno(), f"tcp://127.0.0.1:{port}"),
                (accepted.fileno(), f"tcp://127.0.0.1:{port + 1}"),
                (accepted.fileno(), f"ipc:///tmp/a:{port}"),
            ):
                assert not disconnector.end(descriptor, endpoint)
            assert not closed(peer)
            assert not closed(other)
            assert not closed(accepted)
    os.write(writer, b"open")
    assert os.read(reader, 4) == b"open"
    os.close(reader)
    os.close(writer)
    assert not disconnector.end(reader, f"tcp://127.0.0.1:{port}")


def test_ending_a_connection_needs_no_further_descriptor(disconnector: Disconnector) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted, peer = _connect(listener)
        before = len(os.listdir("/proc/self/fd"))
        with accepted, peer:
            disconnector.end(accepted.fileno(), f"tcp://127.0.0.1:{listener.getsockname()[1]}")
            assert len(os.listdir("/proc/self/fd")) == before
