"""Ports for servers that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sglang_qspec.tools import ports


def test_a_port_is_free_and_the_kernel_gives_it_to_nobody_else() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = ports.free_port()
        assert ports.FIRST <= port < max(first, ports.EPHEMERAL)
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_port()))
        busy = taken.getsockname()[1]
        drawn = iter([busy, busy, busy + 1])
        monkeypatch.setattr("random.randrange", lambda *_: next(drawn))
        assert ports.free_port() == busy + 1


def test_no_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_port()))
        monkeypatch.setattr("random.randrange", lambda *_: taken.getsockname()[1])
        with pytest.raises(OSError, match="no free TCP port"):
            ports.free_port()
