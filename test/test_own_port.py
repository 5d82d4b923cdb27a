"""A server's port that another process takes: clients of the server send nothing to it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_qspec.errors import BatchError, ClientError, ServerLostError
from sglang_qspec.tools import local_server
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.batch.line import parse
from sglang_qspec.tools.batch.own_server import OwnServer
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.local_server import LocalServer
from sglang_qspec.tools.ports import HOST, OwnPort, free_port
from test.strange_server import response, strange
from test.tools.batch.fakes import environment_with_fake_sglang

LINE = parse(1, b'{"prompt": "a secret"}')
LISTEN = """
import socket, sys
kind = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.socket(kind)
if sys.argv[3:]: listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print(flush=True)
sys.stdin.read()
"""
BELOW = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


@contextmanager
def listening(
    port: int, host: str = HOST, *more: str, below: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A process that listens, itself or in a process below it."""
    command = [LISTEN, host, str(port), *more]
    with subprocess.Popen(
        [sys.executable, "-c", *([BELOW] if below else []), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("host", [HOST, "0.0.0.0"])
@pytest.mark.parametrize("below", [False, True])
def test_a_port_is_held_while_the_process_or_one_below_it_listens(host: str, below: bool) -> None:
    port = free_port()
    with listening(port, host, below=below) as process:
        own = OwnPort(port, process.pid)
        assert own.is_held()
        assert own.is_held()
    assert not own.is_held()


def test_a_port_of_another_process_is_not_held() -> None:
    port = free_port()
    with listening(port), listening(free_port()) as child:
        assert not OwnPort(port, child.pid).is_held()


def test_a_port_that_another_process_shares_is_not_held() -> None:
    port = free_port()
    with listening(port, HOST, "shared") as child:
        own = OwnPort(port, child.pid)
        assert own.is_held()
        with listening(port, HOST, "shared"):
            assert not OwnPort(port, child.pid).is_held()


def test_a_port_that_another_process_takes_later_is_not_held() -> None:
    port = free_port()
    with listening(port) as child:
        own = OwnPort(port, child.pid)
        assert own.is_held()
        child.kill()
        child.wait()
        with listening(port):
            assert not own.is_held()


@pytest.mark.parametrize("host", [HOST, "0.0.0.0", "::"])
def test_a_batch_stops_if_another_process_has_the_port_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    environment = environment_with_fake_sglang(tmp_path)
    server = OwnServer([], environment, tmp_path / "log", timeout=60)
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind) as thief:
        thief.bind((host, 0))
        thief.listen()
        thief.settimeout(0.5)
        monkeypatch.setattr(local_server, "free_port", lambda: thief.getsockname()[1])
        with pytest.raises(BatchError, match="the start of the server ended with code 1"):
            asyncio.run(server.open())
        with pytest.raises(TimeoutError):
            thief.accept()


def test_a_lost_server_whose_port_another_process_takes_gets_no_lines(tmp_path: Path) -> None:
    local = LocalServer([], environment_with_fake_sglang(tmp_path), tmp_path / "log")
    local.launch()
    http = HttpServer(local.url, timeout=60, listens=local.listens)
    client = Client(local.url, listens=local.listens)

    async def run() -> None:
        deadline = time.monotonic() + 120
        while not local.listens() and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        await http.open()
        assert (await http.ask(LINE)).tokens == 4
        local.stop()
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind((HOST, int(local.url.rpartition(":")[2])))
            thief.listen()
            thief.settimeout(0.5)
            with pytest.raises(ServerLostError, match="does not listen on its port"):
                await http.ask(LINE)
            with pytest.raises(ClientError, match="does not listen on its port"):
                await asyncio.to_thread(client.state)
            with pytest.raises(TimeoutError):
                thief.accept()
        await http.close()

    asyncio.run(run())


@pytest.mark.parametrize("answers", [[False], [True, False]])
def test_nothing_is_sent_on_a_connection_to_another_process(answers: Sequence[bool]) -> None:
    """The port changes its owner before the connection, or while it is made."""
    with strange(lambda path, body: response({})) as thief:  # noqa: ARG005
        left = [*answers, False, False, False, False]
        http = HttpServer(thief.url, timeout=60, listens=lambda: left.pop(0))

        async def ask() -> None:
            with pytest.raises(ServerLostError):
                await http.ask(LINE)
            await http.close()

        asyncio.run(ask())
        left = [*answers]
        with pytest.raises(ClientError, match="does not listen on its port"):
            list(Client(thief.url, listens=lambda: left.pop(0)).generate("a secret", {}))
        assert thief.asked == []
