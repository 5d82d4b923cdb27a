"""The processes of a server, with a small program in SGLang's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmark.server import Server

PROGRAM = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[Server]:
    with_child = Server("model", launcher=("-c", PROGRAM))
    with_child.launch()
    wait_for(lambda: len(with_child.processes) == 2)
    yield with_child
    with_child.stop()


def statuses(server: Server) -> set[str]:
    return {process.status() for process in server.processes}


def test_a_paused_server_stands_still_with_all_its_processes_until_it_is_resumed(
    server: Server,
) -> None:
    server.pause()
    wait_for(lambda: statuses(server) == {psutil.STATUS_STOPPED})
    server.resume()
    wait_for(lambda: psutil.STATUS_STOPPED not in statuses(server))


def test_a_paused_server_can_be_stopped(server: Server) -> None:
    processes = server.processes
    server.pause()
    server.stop()
    assert not any(process.is_running() for process in processes)


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at a parent's death is Linux's")
def test_a_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import pathlib, time\n"
        "from benchmark.server import Server\n"
        "server = Server('model', launcher=('-c', 'import time; time.sleep(60)'))\n"
        "server.launch()\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(server.processes[0].pid))\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root, env=dict(os.environ))
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text())
        process = psutil.Process(int(pid_file.read_text()))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
