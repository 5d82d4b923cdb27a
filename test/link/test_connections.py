"""Unused connections block no server and leave the sidecar idle."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sglang_qspec.link import LinkState, PrivateEndpoint, connections, descriptors, keys
from test.link.flood import Flood
from test.link.sockets import closed, plain_socket
from test.link.wire import DEADLINE_S, Wire, until

DESCRIPTORS = 100
SILENT = 186
"""More connections than the sidecar has descriptors for."""
PER_SECOND = 300
EVENTS = 1000
"""Number of events in the queue of ZMQ's monitor; ZMQ's thread waits when the queue is full."""
QUIET_S = 0.5


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    """Raise this process's limit: the test needs a descriptor for each connection of a flood."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors.raise_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(params=["ipc", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@contextmanager
def cramped(
    transport: str, folder: Path, limit: int = DESCRIPTORS, *, paused: bool = False
) -> Iterator[tuple[Wire, subprocess.Popen[str]]]:
    """A sidecar in its own process with a low limit of open files, and that process.

    If it is paused, it reads its socket only after a line on its standard input.
    """
    with PrivateEndpoint() as private:
        path = folder / "qspec.key"
        pair = keys.create(path) if transport == "tcp" else None
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "test.link.cramped_sidecar"),
                "tcp://127.0.0.1:*" if pair else private.address,
                *(str(limit), str(int(paused))),
                *([str(path)] if pair else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        wire = Wire(process.stdout.readline().strip(), pair)
        try:
            yield wire, process
        finally:
            wire.close()
            process.stdin.close()
            code = process.wait(60)
            process.stdout.close()
        assert code == 0


def test_servers_connect_despite_a_flood_of_silent_connections(
    transport: str, tmp_path: Path
) -> None:
    with cramped(transport, tmp_path) as (wire, _):
        before = wire.link()
        until(lambda: before.state is LinkState.READY, before.receive)
        with Flood(wire.endpoint, SILENT, per_second=PER_SECOND) as flood:
            until(lambda: flood.opened > SILENT, before.receive)
            links = [before, *(wire.link() for _ in range(3))]
            steps = [link.receive for link in links]
            until(lambda: all(link.state is LinkState.READY for link in links), *steps)
            opened = flood.opened
            until(lambda: flood.opened > opened + SILENT, *steps)
        assert [link.state for link in links] == [LinkState.READY] * 4
        assert [link.session_count for link in links] == [1] * 4


def test_silent_connections_leave_the_sidecar_idle(tmp_path: Path) -> None:
    with cramped("tcp", tmp_path) as (wire, process):
        sidecar = psutil.Process(process.pid)
        with Flood(wire.endpoint, SILENT, per_second=PER_SECOND, at_once=True):
            time.sleep(0.5)
            used = sidecar.cpu_times()
            time.sleep(2)
            now = sidecar.cpu_times()
        assert now.user + now.system - used.user - used.system < 1
        newcomer = wire.link()
        until(lambda: newcomer.state is LinkState.READY, newcomer.receive)


def test_the_connections_that_zmq_accepts_during_a_long_pass_are_bounded(tmp_path: Path) -> None:
    most = 1900
    with cramped("ipc", tmp_path, limit=1600, paused=True) as (wire, process):
        silent = _open_while_accepted(wire.endpoint, most)
        assert len(silent) < most
        # Without a free descriptor ZMQ would abort the process.
        assert psutil.Process(process.pid).num_fds() < 1200
        for one in silent:
            one.close()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        newcomer = wire.link()
        until(lambda: newcomer.state is LinkState.READY, newcomer.receive)


def _open_while_accepted(endpoint: str, most: int) -> list[socket.socket]:
    """Connect until the sidecar, which reads no events, accepts no connection for QUIET_S.

    Connects at most `most` times. Fails if the sidecar accepts fewer connections than ZMQ's queue
    has room for events.
    """
    opened: list[socket.socket] = []
    began = accepted_at = time.monotonic()
    while len(opened) < most and time.monotonic() - accepted_at < QUIET_S:
        if len(opened) <= EVENTS:
            accepted_at = time.monotonic()
            assert accepted_at - began < DEADLINE_S, f"only {len(opened)} connections were accepted"
        try:
            opened.append(plain_socket(endpoint, blocking=False))
            accepted_at = time.monotonic()
        except BlockingIOError:
            time.sleep(0.001)
    return opened


def test_only_connections_without_a_server_are_closed(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 5)
    server = wire.serve()
    links = [wire.link() for _ in range(4)]
    steps = [link.receive for link in links] + [lambda: server.receive(0)]
    until(lambda: all(link.state is LinkState.READY for link in links), *steps)
    silent = [plain_socket(wire.endpoint) for _ in range(20)]
    until(lambda: sum(map(closed, silent)) == 19, *steps)
    for _ in range(100):
        for step in steps:
            step()
    assert sum(map(closed, silent)) == 19
    assert [link.session_count for link in links] == [1] * 4
    for one in silent:
        one.close()


def test_a_silent_server_frees_its_connection(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    server = wire.serve(forget_after_s=0.2)
    hung = wire.link()
    until(lambda: hung.state is LinkState.READY, hung.receive, lambda: server.receive(0))
    newcomer = wire.link()
    until(lambda: newcomer.state is LinkState.READY, newcomer.receive, lambda: server.receive(10))


def test_a_connection_that_stops_in_the_handshake_is_closed(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
    server = wire.serve()
    mechanism = b"NULL" if wire.keys is None else b"CURVE"
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)
    stalled = []
    for said in (b"", greeting[:20], greeting):
        stalled.append(plain_socket(wire.endpoint))
        stalled[-1].sendall(said)
    until(lambda: all(map(closed, stalled)), lambda: server.receive(0))
    for one in stalled:
        one.close()


@pytest.mark.timeout(30, method="thread")
def test_a_sidecar_ends_although_zmq_waits_for_room_in_its_queue_of_events() -> None:
    with PrivateEndpoint() as private:
        wire = Wire(private.address)
        server = wire.serve()
        silent = _open_while_accepted(private.address, 1200)
        server.close()
        for one in silent:
            one.close()
