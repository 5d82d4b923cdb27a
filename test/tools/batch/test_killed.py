"""The command as a process: it is killed and interrupted, and so are its servers."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from test.tools.batch.fakes import (
    ROOT,
    FakeProcess,
    assert_complete,
    environment_with_fake_sglang,
    records_of,
    write_lines,
)

PROMPTS = [f"prompt {i}" for i in range(1000)]
STARTED: list[subprocess.Popen[str]] = []
DELAY = ("--delay", "0.05", "--slots", "4")
SLOW = ("--in-flight", "4")
"""Options with which a batch takes seconds, so it has not ended when a busy machine kills it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An input of PROMPTS."""
    return write_lines(tmp_path / "in.jsonl", PROMPTS)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def fakes() -> Iterator[list[FakeProcess]]:
    servers = [FakeProcess(*DELAY) for _ in range(2)]
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.kill()


def start(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command in a process, which `no_process_is_left` ends if a test fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_qspec", "batch", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    """What the command printed, after its end with this exit status."""
    out, _ = process.communicate(timeout=600)
    assert process.returncode == status, out
    return out


def whole_lines(output: Path) -> list[bytes]:
    """The whole lines of an output."""
    return output.read_bytes().split(b"\n")[:-1] if output.exists() else []


def until_more(output: Path, more: int, process: subprocess.Popen[str]) -> None:
    """Wait until the output has a number of records more."""
    count = len(whole_lines(output)) + more
    until(lambda: len(whole_lines(output)) >= count, process)


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition is true, at most until the process ends."""
    while process.poll() is None and not condition():
        time.sleep(0.005)


def test_killed_clients_and_servers_lose_and_repeat_no_line(
    path: Path, output: Path, fakes: list[FakeProcess]
) -> None:
    chance = random.Random(7)
    urls = [word for server in fakes for word in ("--url", server.url)]
    options = [path, "--output", output, "--resume", *SLOW, *urls]
    for end in range(1, 5):
        process = start(*options)
        until_more(output, chance.randrange(40, 120), process)
        if end % 2:
            victim = chance.choice(fakes)
            victim.kill()
            until_more(output, chance.randrange(20, 60), process)
            victim.start()
        process.kill()
        process.communicate()
        if chance.random() < 0.5:
            with output.open("ab") as file:  # as if the last write was torn
                file.write(b'{"id":"batch_req_9","custom')
    assert len(whole_lines(output)) < len(PROMPTS)
    process = start(*options)
    ended(process)
    assert_complete(output, PROMPTS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_batch_and_says_how_to_continue(
    path: Path, output: Path, fakes: list[FakeProcess], number: signal.Signals
) -> None:
    process = start(path, "--output", output, "--url", fakes[0].url, *SLOW)
    until(lambda: len(whole_lines(output)) > 50, process)
    process.send_signal(number)
    out = ended(process, 128 + number)
    assert "interrupted; the same command with --resume continues\n" in out
    assert "Traceback" not in out
    process = start(path, "--output", output, "--url", fakes[1].url, "--resume")
    ended(process)
    assert_complete(output, PROMPTS)


def test_a_batch_under_nohup_outlives_its_terminal(
    tmp_path: Path, output: Path, fakes: list[FakeProcess]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", PROMPTS[:100])
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the process inherits
    try:
        process = start(path, "--output", output, "--url", fakes[0].url, *SLOW)
    finally:
        signal.signal(signal.SIGHUP, handler)
    until(lambda: len(whole_lines(output)) > 5, process)
    process.send_signal(signal.SIGHUP)
    ended(process)
    assert_complete(output, PROMPTS[:100])


@pytest.fixture
def fake_sglang(tmp_path: Path) -> dict[str, str]:
    """An environment in which `sglang.launch_server` is a fake server."""
    return environment_with_fake_sglang(tmp_path)


def servers_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_an_own_server_gets_its_flags_and_ends_with_the_batch(
    tmp_path: Path, output: Path, fake_sglang: dict[str, str]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", PROMPTS[:20])
    models = ["--model", "target", "--draft-model", "draft"]
    given = [path, "--output", output, *models, "--", "--max-running-requests", "4"]
    process = start(*given, environment=fake_sglang)
    until(lambda: bool(servers_below(process)), process)
    (server,) = servers_below(process)
    ended(process)
    assert not server.is_running()
    assert_complete(output, PROMPTS[:20])
    log = (tmp_path / "out.server.log").read_text()
    words = "'--speculative-algorithm', 'QSPEC', '--speculative-draft-model-path', 'draft', "
    assert words + "'--max-running-requests', '4', '--host', '127.0.0.1'" in log


def test_an_own_server_that_dies_is_started_again(
    path: Path, output: Path, fake_sglang: dict[str, str]
) -> None:
    given = (path, "--output", output, "--model", "target", *SLOW)
    process = start(*given, environment=fake_sglang)
    for count in (100, 100):
        until_more(output, count, process)
        (server,) = servers_below(process)
        server.kill()
    out = ended(process)
    assert out.count("starting a server") == 3
    assert_complete(output, PROMPTS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_own_server_ends_however_the_batch_ends(
    path: Path, output: Path, fake_sglang: dict[str, str], number: signal.Signals
) -> None:
    given = (path, "--output", output, "--model", "target", *SLOW)
    process = start(*given, environment=fake_sglang)
    until(lambda: len(whole_lines(output)) > 20, process)
    (server,) = servers_below(process)
    process.send_signal(number)
    process.communicate(timeout=600)
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_a_signal_during_the_start_ends_the_server(
    path: Path, output: Path, fake_sglang: dict[str, str]
) -> None:
    process = start(path, "--output", output, "--model", "target", environment=fake_sglang)
    until(lambda: bool(servers_below(process)), process)
    (server,) = servers_below(process)
    process.send_signal(signal.SIGTERM)
    ended(process, 128 + signal.SIGTERM)
    assert not server.is_running()


def test_an_own_server_that_does_not_start_is_an_error_with_its_log(
    tmp_path: Path, output: Path, fake_sglang: dict[str, str]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", PROMPTS[:3])
    process = start(path, "--output", output, "--model", "fails", environment=fake_sglang)
    out = ended(process, 1)
    assert "qspec: the start of the server ended with code 1:\n" in out
    assert "the model is missing" in out
    assert "Traceback" not in out


def test_a_line_that_ends_an_own_server_again_and_again_fails(
    tmp_path: Path, output: Path, fake_sglang: dict[str, str]
) -> None:
    prompts = [*PROMPTS[:100], "crash", *PROMPTS[100:200]]
    path = write_lines(tmp_path / "in.jsonl", prompts)
    process = start(path, "--output", output, "--model", "target", environment=fake_sglang)
    ended(process, 3)
    assert_complete(output, PROMPTS[:200])
    (failed,) = records_of(tmp_path / "out.errors.jsonl")
    assert failed["custom_id"] == "crash"
