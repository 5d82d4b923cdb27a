"""The processes of a server; a small program stands in for SGLang."""

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

from benchmark.harness import server as server_module
from benchmark.harness.server import Server, reason

PROGRAM = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
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


def test_a_paused_server_stops_all_its_processes_until_it_is_resumed_or_stopped(
    server: Server,
) -> None:
    server.pause()
    wait_for(lambda: statuses(server) == {psutil.STATUS_STOPPED})
    server.resume()
    wait_for(lambda: psutil.STATUS_STOPPED not in statuses(server))
    processes = server.processes
    server.pause()
    server.stop()
    assert not any(process.is_running() for process in processes)


def test_a_server_that_is_pinned_from_its_start_runs_on_its_cores_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = max(os.sched_getaffinity(0))
    pinned = Server("model", cores=(core,), pinned_from_start=True, launcher=("-c", PROGRAM))
    pinned.launch()
    try:
        wait_for(lambda: len(pinned.processes) == 2)
        assert all(process.cpu_affinity() == [core] for process in pinned.processes)
        # It runs, so it does not explain a lost connection.
        lost = ConnectionResetError("no response")
        monkeypatch.setattr(server_module, "CRASH_SECONDS", 0.0)
        assert pinned.explain(lost) is lost
    finally:
        pinned.stop()


def test_a_lost_connection_is_explained_by_the_last_line_that_names_an_error() -> None:
    ended = Server("model", launcher=("-c", "raise ValueError('no such kernel')"))
    ended.launch()
    wait_for(lambda: ended.exit_code() is not None)
    assert reason(ended.explain(ConnectionResetError())) == "ValueError: no such kernel"
    log = "the server ended with code 1:\nloading\nValueError: no such kernel\nbye"
    assert reason(RuntimeError(log)) == "ValueError: no such kernel"
    assert reason(ConnectionResetError()) == "ConnectionResetError"


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at a parent's death is Linux's")
def test_a_server_ends_when_the_benchmark_process_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import pathlib, time\n"
        "from benchmark.harness.server import Server\n"
        "server = Server('model', launcher=('-c', 'import time; time.sleep(60)'))\n"
        "server.launch()\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(server.processes[0].pid))\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).parents[3]
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root, env=dict(os.environ))
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text())
        process = psutil.Process(int(pid_file.read_text()))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
