"""A server that the batch owns: a scripted one, and a real one that serves the demo models."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmark.prompts import PROMPTS
from sglang_qspec.errors import BatchError, ServerLostError
from sglang_qspec.tools.batch import own_server
from sglang_qspec.tools.batch.http_server import HttpServer
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.own_server import OwnServer
from sglang_qspec.tools.batch.runner import Runner
from sglang_qspec.tools.batch.server import Reply
from sglang_qspec.tools.models import DemoModels
from test.tools.batch.fakes import ROOT, records_of
from test.tools.batch.scripted import ANSWERED, Input, Kept

FLAGS = ["--dtype", "float32", "--max-running-requests", "2", "--context-length", "2048"]
KV = ["--max-total-tokens", "8192", "--log-level", "warning"]


class Process:
    """A process that starts at once."""

    url = "http://scripted"
    age = 0.0
    has_failed_to_start = False

    def __init__(self, *_: object, **__: object) -> None:
        """Take the arguments of `LocalServer`."""

    def launch(self) -> None:
        return

    def listens(self) -> bool:
        return True

    def stop(self) -> None:
        return


async def opened(self: HttpServer) -> None:
    """Find no fault with the server."""


async def asked(self: HttpServer, line: Line, *_: object) -> Reply:
    """Answer a line; the line `crash` ends the server."""
    if line.custom_id == "crash":
        raise ServerLostError("the connection broke")
    return ANSWERED


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnServer:
    """A server without a process and connections."""
    monkeypatch.setattr(own_server, "LocalServer", Process)
    monkeypatch.setattr(HttpServer, "open", opened)
    monkeypatch.setattr(HttpServer, "ask", asked)
    return OwnServer([], {}, tmp_path / "log", timeout=1)


@pytest.mark.parametrize("name", ["crash", "other"])
def test_a_first_line_that_ends_the_server_fails_before_the_batch_stops(
    server: OwnServer, name: str
) -> None:
    kept = Kept()
    asyncio.run(asyncio.wait_for(Runner([server], kept).run(aiter(Input([name, "a", "b"]))), 60))
    kept.assert_once([name, "a", "b"])
    assert set(kept.failed) == {name} & {"crash"}


def test_a_server_that_answers_nothing_stops_the_batch(server: OwnServer) -> None:
    async def run() -> None:
        for _ in range(own_server.DEATHS):
            await server.open()
        with pytest.raises(BatchError, match="the server ended 4 times without an answer"):
            await server.open()

    asyncio.run(run())


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.usefixtures("models")
def test_without_a_model_the_demo_models_answer_and_a_killed_server_comes_back(
    tmp_path: Path, models: DemoModels
) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chats = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]
    path.write_text("".join(json.dumps({**chat, "temperature": 0}) + "\n" for chat in chats))
    given = ["batch", str(path), "--output", str(output), "--max-tokens", "64", "--", *FLAGS, *KV]
    with subprocess.Popen(
        [sys.executable, "-m", "sglang_qspec", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as process:
        while process.poll() is None and (not output.exists() or not records_of(output)):
            time.sleep(0.2)
        below = psutil.Process(process.pid).children(recursive=True)
        scheduler = next(each for each in below if "scheduler" in "".join(each.cmdline()))
        scheduler.kill()
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert f"without --model the demo models answer: target {models.target}" in out
    assert out.count("starting a server") == 2
    records = records_of(output)
    assert {each["custom_id"] for each in records} == {str(i + 1) for i in range(len(PROMPTS))}
    assert len(records) == len(PROMPTS)
    assert "passes saved" in out
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
