"""When a scheduler's process forks the fork server of its sidecar; the sidecar does not run."""

import multiprocessing
import os
import socket
import threading

import psutil
import pytest

from sglang_qspec.config import CPU_ENGINE
from sglang_qspec.engine.placement import environment
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.engine.sidecar import scheduler_fork
from sglang_qspec.sidecar import loading

SPAWN = multiprocessing.get_context("spawn")
ON_CPU = Placement("cpu")
CASES: list[tuple[Placement | None, int, int, str]] = [
    (ON_CPU, 0, 0, "1"),
    (ON_CPU, 1, 0, "1"),
    (ON_CPU, 0, 1, "1"),
    (ON_CPU, 0, 0, "0"),
    (Placement("cuda:0"), 0, 0, "1"),
    (None, 0, 0, "1"),
]
"""Placement, ranks of the process, and SGLang's variable for CPUs; only the first one forks."""


def wait(orders: socket.socket) -> int:
    """In place of a fork server: wait for the end of the other end."""
    orders.recv(1)
    return 0


def forks(placed: Placement | None, tp_rank: int, pp_rank: int, engine: str) -> bool:
    """Whether this process, that of a scheduler, forks."""
    environment.write(placed)
    os.environ[CPU_ENGINE] = engine
    scheduler_fork._has_begun = False
    for _ in range(2):  # a sidecar calls it again
        scheduler_fork.fork_scheduler(None, tp_rank=tp_rank, pp_rank=pp_rank)
    children = [each.pid for each in psutil.Process().children()]
    taken = scheduler_fork.take()
    assert children == ([] if taken is None else [taken.pid])
    if taken is not None:
        taken.close()
    return taken is not None


def scheduler(answers: "multiprocessing.Queue[list[bool]]") -> None:
    """A scheduler's process: whether it forks in each of CASES, and then with another thread."""
    loading.import_modules = lambda: None
    vars(scheduler_fork)["serve_forked"] = wait
    found = [forks(*case) for case in CASES]
    scheduler_fork._has_begun = False
    environment.write(ON_CPU)
    os.environ[CPU_ENGINE] = "1"
    scheduler_fork.fork_scheduler(None, tp_rank=0, pp_rank=0)
    scheduler_fork.discard()
    assert not psutil.Process().children()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    answers.put([*found, forks(*CASES[0])])


def test_only_the_first_scheduler_of_a_server_with_a_sidecar_on_a_cpu_forks() -> None:
    answers = SPAWN.Queue()
    process = SPAWN.Process(target=scheduler, args=(answers,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert answers.get(timeout=10) == [True, *[False] * len(CASES)]


def test_a_process_that_is_no_child_of_a_server_does_not_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_fork, "_has_begun", False)
    environment.write(ON_CPU)
    try:
        scheduler_fork.fork_scheduler(None, tp_rank=0, pp_rank=0)
    finally:
        environment.write(None)
    assert scheduler_fork.take() is None
