"""Restarts of a sidecar that dies or does not start; the program is a stand-in."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from sglang_qspec.config import LONGEST_BACKLOG_S, MAX_BACKLOG_S, QSpecConfig
from sglang_qspec.sidecar.child_process import (
    BACKOFF_S,
    LOOK_S,
    PROGRAM,
    SERVED_S,
    SETTLED_S,
    UNUSABLE,
    SidecarProcess,
)
from sglang_qspec.sidecar.options import parser
from test.sidecar.supervision import Clock, sidecar_on, until


@pytest.fixture
def clock() -> Clock:
    return Clock()


def program(clock: Clock, code: str, visible: str | None = None) -> SidecarProcess:
    process = sidecar_on("cuda:0", clock, visible)  # which no fork server starts
    process.command[:] = [sys.executable, "-c", code]
    return process


def die(process: SidecarProcess, clock: Clock) -> None:
    """Wait until the process has died and `keep_alive` has noticed."""
    until(lambda: not process.alive)
    clock.now += LOOK_S
    process.keep_alive()


def test_a_sidecar_that_dies_is_restarted_with_growing_delays_and_finally_given_up(
    clock: Clock,
) -> None:
    process = program(clock, "raise SystemExit(3)")
    process.start()
    for number, wait_s in enumerate(BACKOFF_S):
        die(process, clock)
        clock.now += wait_s - LOOK_S
        process.keep_alive()
        assert process.restarts == number
        clock.now += LOOK_S
        process.keep_alive()
        assert process.restarts == number + 1
    die(process, clock)
    clock.now += 10 * max(BACKOFF_S)
    process.keep_alive()
    assert process.restarts == len(BACKOFF_S)
    assert process.exit_code == 3


def test_a_sidecar_whose_draft_model_cannot_work_is_not_restarted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    process = program(clock, f"raise SystemExit({UNUSABLE})")
    process.start()
    for _ in range(3):
        die(process, clock)
        clock.now += max(BACKOFF_S)
    assert process.restarts == 0
    assert [message for message in caplog.messages if "will not be started again" in message]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_a_long_run_resets_the_restart_delay(clock: Clock) -> None:
    process = program(clock, "raise SystemExit(3)")
    process.start()
    for _ in range(2 * len(BACKOFF_S)):
        until(lambda: not process.alive)
        clock.now += SETTLED_S
        process.keep_alive()
        clock.now += BACKOFF_S[0]
        process.keep_alive()
    assert process.restarts == 2 * len(BACKOFF_S)


@pytest.mark.parametrize(("served_s", "settled"), [(SERVED_S, True), (SERVED_S - LOOK_S, False)])
def test_a_sidecar_that_has_served_may_fail_each_minute(
    served_s: float, settled: bool, clock: Clock
) -> None:
    process = program(clock, "raise SystemExit(3)")
    process.start()
    for _ in range(2 * len(BACKOFF_S)):
        process.keep_alive(connected=True)
        until(lambda: not process.alive)
        clock.now += served_s
        process.keep_alive()
        if process.given_up:
            break
        clock.now += max(BACKOFF_S)
        process.keep_alive()
    assert process.given_up is not settled


def test_a_running_or_stopped_sidecar_is_not_restarted(clock: Clock) -> None:
    process = program(clock, "import time; time.sleep(600)")
    process.keep_alive()
    assert not process.alive
    process.start()
    clock.now += LOOK_S
    process.keep_alive()
    pid = process.pid
    process.stop()
    for _ in range(3):
        clock.now += max(BACKOFF_S)
        process.keep_alive()
    assert (process.pid, process.alive, process.restarts) == (pid, False, 0)


def test_a_failed_start_is_tried_again_with_the_same_delays(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interpreter = tmp_path / "python"
    process = program(clock, "import time; time.sleep(600)")
    process.command[0] = str(interpreter)
    process.start()
    for wait_s in BACKOFF_S[:2]:
        assert not process.alive
        clock.now += LOOK_S
        process.keep_alive()
        assert f"No such file or directory: '{interpreter}'" in caplog.messages[-1]
        assert f"restarting it in {wait_s:g} s" in caplog.messages[-1]
        clock.now += wait_s - LOOK_S
        process.keep_alive()
        assert not process.alive
        if wait_s == BACKOFF_S[1]:
            interpreter.symlink_to(sys.executable)
        clock.now += LOOK_S
        process.keep_alive()
    try:
        assert process.alive
        assert process.restarts == 1
    finally:
        process.stop()


def test_a_sidecar_that_never_starts_is_given_up(clock: Clock) -> None:
    process = program(clock, "")
    process.command[0] = "/nowhere/python"
    process.start()
    for wait_s in BACKOFF_S:
        clock.now += LOOK_S
        process.keep_alive()
        clock.now += wait_s
        process.keep_alive()
    clock.now += LOOK_S
    process.keep_alive()
    process.command[0] = sys.executable
    clock.now += 10 * max(BACKOFF_S)
    process.keep_alive()
    assert (process.pid, process.restarts) == (None, 0)


STUBBORN = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(flush=True, file=open(sys.argv[1], 'w')); time.sleep(600)"
)


def deaf_program(clock: Clock, folder: Path) -> SidecarProcess:
    """A running sidecar that ignores SIGTERM."""
    deaf = folder / "deaf"
    process = program(clock, STUBBORN)
    process.command.append(str(deaf))
    process.start()
    until(deaf.exists)
    return process


def test_dismiss_ends_a_sidecar_for_good(clock: Clock) -> None:
    process = program(clock, "import time; time.sleep(600)")
    process.start()
    process.dismiss()
    until(lambda: process.exit_code == -signal.SIGTERM)
    clock.now += max(BACKOFF_S)
    process.keep_alive()
    clock.now += max(BACKOFF_S)
    process.keep_alive()
    assert not process.alive
    assert process.restarts == 0


def test_dismiss_does_not_wait_for_the_end(clock: Clock, tmp_path: Path) -> None:
    process = deaf_program(clock, tmp_path)
    process.dismiss(grace_s=60.0)
    assert process.alive  # a wait would have ended with the kill
    process.stop(grace_s=0.0)


def test_a_dismissed_sidecar_that_does_not_end_is_killed(clock: Clock, tmp_path: Path) -> None:
    process = deaf_program(clock, tmp_path)
    pid = process.pid
    assert pid is not None
    process.dismiss(grace_s=0.2)
    process.stop(grace_s=60.0)  # the server may end meanwhile and then calls stop
    assert process.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("visible", ["0,1", None])
def test_the_sidecar_sees_all_gpus_of_the_server_although_the_scheduler_sees_one(
    visible: str | None, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS", "1")
    seen = tmp_path / "seen"
    names = "'CUDA_VISIBLE_DEVICES', 'SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS'"
    code = f"import os; open({str(seen)!r}, 'w').write(repr([*map(os.environ.get, [{names}])]))"
    process = program(clock, code, visible)
    process.start()
    until(lambda: not process.alive)
    assert seen.read_text() == repr([visible, None])


def test_a_sidecar_for_the_schedulers_of_one_server_leaves_out_nothing() -> None:
    def backlog(shared: bool) -> float:
        process = SidecarProcess(
            QSpecConfig(),
            model_path="m",
            quantization=None,
            endpoint="ipc:///nowhere",
            device="cpu",
            shared=shared,
        )
        return float(parser().parse_args(process.command[len(PROGRAM) :]).max_backlog)

    assert backlog(shared=False) == MAX_BACKLOG_S
    assert backlog(shared=True) == LONGEST_BACKLOG_S
