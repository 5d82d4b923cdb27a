"""A sidecar that dies is started again, later each time; the program is a stand-in that fails."""

import sys
import time
from collections.abc import Callable

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.sidecar.process import BACKOFF_S, LOOK_S, SETTLED_S, SidecarProcess


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def program(clock: Clock, code: str) -> SidecarProcess:
    process = SidecarProcess(
        QSpecConfig(),
        model_path="m",
        quantization=None,
        endpoint="ipc:///nowhere",
        device="cpu",
        clock=clock,
    )
    process.command[:] = [sys.executable, "-c", code]
    return process


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die(process: SidecarProcess, clock: Clock) -> None:
    """Until it has, and that was seen."""
    until(lambda: not process.alive)
    clock.now += LOOK_S
    process.keep_alive()


def test_one_that_dies_is_started_again_later_each_time_and_given_up_at_last(clock: Clock) -> None:
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


def test_one_that_ran_for_long_is_as_good_as_new(clock: Clock) -> None:
    process = program(clock, "raise SystemExit(3)")
    process.start()
    for _ in range(2 * len(BACKOFF_S)):
        until(lambda: not process.alive)
        clock.now += SETTLED_S
        process.keep_alive()
        clock.now += BACKOFF_S[0]
        process.keep_alive()
    assert process.restarts == 2 * len(BACKOFF_S)


def test_one_that_lives_or_was_stopped_is_left_alone(clock: Clock) -> None:
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
