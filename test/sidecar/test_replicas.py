"""One command runs several sidecars, and restarts those that end; the program is a stand-in."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.sidecar import __main__ as program
from sglang_qspec.sidecar import replicas
from sglang_qspec.sidecar.child_process import PROGRAM, UNUSABLE
from sglang_qspec.sidecar.options import parser

MODEL = ["--model-path=org/m"]


def options_of(arguments: list[str]) -> list[list[str]]:
    """The options by which the replicas of a command line differ."""
    options = parser().parse_args(arguments)
    parsed = [
        parser().parse_args(command[len(PROGRAM) :])
        for command in replicas.commands(options, arguments)
    ]
    assert all(each.replicas == 1 and each.model_path == "org/m" for each in parsed)
    return [[each.endpoint, each.device, each.cores, each.metrics_port] for each in parsed]


def test_each_replica_has_its_own_gpu_socket_and_metrics_port() -> None:
    given = ["--endpoint=ipc:///run/q/link", "--device=cuda", "--metrics-port=9100"]
    assert options_of([*MODEL, *given, "--replicas=2"]) == [
        ["ipc:///run/q/link-0", "cuda:0", "", 9100],
        ["ipc:///run/q/link-1", "cuda:1", "", 9101],
    ]


def test_replicas_on_a_cpu_divide_the_cores_and_take_the_next_ports() -> None:
    given = ["--endpoint", "tcp://[::1]:5000", "--device", "cpu", "--cores", "0-4"]
    assert options_of([*MODEL, *given, "--replicas", "2"]) == [
        ["tcp://[::1]:5000", "cpu", "0,1", 0],
        ["tcp://[::1]:5001", "cpu", "2,3", 0],
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--endpoint=ipc:///l"], "--device is '', but with --replicas it must be cuda"),
        (["--endpoint=ipc:///l", "--device=cuda:1"], "--device is 'cuda:1'"),
        (["--endpoint=tcp://h:*", "--device=cuda"], "--endpoint is 'tcp://h:*'"),
        (["--endpoint=tcp://h:65535", "--device=cuda"], "--endpoint is 'tcp://h:65535'"),
        (["--endpoint=tcp://h:0", "--device=cuda"], "--endpoint is 'tcp://h:0'"),
        (["--endpoint=ipc:///l", "--device=cpu", "--cores=3"], "--cores is '3', but 2 replicas"),
        (["--endpoint=ipc:///l", "--device=cpu", "--cores=x"], "--cores is 'x', but must be"),
        (
            ["--endpoint=ipc:///l", "--device=cuda", "--metrics-port=65535"],
            "--metrics-port is 65535, but with --replicas 2 the last port would be 65536: give at "
            "most 65534",
        ),
    ],
)
def test_options_that_cannot_be_divided_are_refused(
    given: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = [*MODEL, *given, "--replicas=2"]
    with pytest.raises(ConfigError) as error:
        options_of(arguments)
    assert str(error.value).startswith(words)
    assert program.main(arguments) == UNUSABLE
    assert words in caplog.text


class Running:
    """The replicas of a stand-in program, in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        monkeypatch.setattr("sglang_qspec.sidecar.replicas.PROGRAM", (sys.executable, "-c", code))
        arguments = [*MODEL, "--endpoint=ipc:///l", "--device=cuda", "--replicas=2"]
        options = parser().parse_args(arguments)
        self.stopping = threading.Event()
        self.code: int | None = None

        def run() -> None:
            self.code = replicas.run(options, arguments, self.stopping)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def end(self) -> int | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.code


def test_a_replica_that_ends_is_restarted_and_all_end_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replica 0 ends at its first start; both note their starts, and remove a file at the end."""
    code = f"""
import pathlib, signal, sys, time
folder = pathlib.Path({str(tmp_path)!r})
number = [a for a in sys.argv if a.startswith("--endpoint")][-1][-1]
starts = folder / f"starts-{{number}}"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if number == "0" and starts.read_text() == "x":
    sys.exit(3)
running = folder / f"running-{{number}}"
def stop(*_):
    running.unlink()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
running.touch()
while True:
    time.sleep(0.05)
"""
    running = Running(monkeypatch, code)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("running-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.stopping.set()
    assert running.end() == 0
    assert not list(tmp_path.glob("running-*"))
    assert (tmp_path / "starts-0").read_text() == "xx"
    assert (tmp_path / "starts-1").read_text() == "x"


def test_the_command_ends_when_no_replica_can_work(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(monkeypatch, f"raise SystemExit({UNUSABLE})")
    assert running.end() == UNUSABLE
