"""`python -m sglang_qspec.sidecar.fork_server`: forks sidecars on CPUs by orders of its parent.

`sidecar.forks` is the parent's end. The program gets the connection as its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker

from setproctitle import getproctitle, setproctitle

from sglang_qspec.sidecar import hardware
from sglang_qspec.sidecar.child_process import PROGRAM
from sglang_qspec.sidecar.forks import LONGEST_ORDER, REPORT, exit_with

TITLE = "sglang-qspec::fork-server"
"""Name of the process in a list of processes."""
LOOK_MS = 500
"""Time between two checks that the parent lives, in milliseconds."""
GRACE_MS = 10_000
"""Time of a sidecar to end after the parent of its fork server has ended, in milliseconds."""
_PR_SET_PDEATHSIG = 1

Program = Callable[[Sequence[str]], int]
"""Runs a sidecar with its arguments, and returns the exit code."""


def serve(orders: socket.socket, run: Program) -> int:
    """Fork a process that calls `run` for each order of a sidecar, until the parent ends.

    Call it in the main thread, once all modules are imported. It returns 0 when the parent has
    ended or closed its end.
    """
    setproctitle(TITLE)
    parent = os.getppid()
    poller = select.poll()
    poller.register(orders, select.POLLIN)
    sidecar: _Sidecar | None = None
    while os.getppid() == parent:
        ready = {number for number, _ in poller.poll(LOOK_MS)}
        if sidecar is not None and sidecar.life in ready:
            poller.unregister(sidecar.life)
            _report(orders, False, sidecar.reap())
            sidecar = None
        if orders.fileno() not in ready:
            continue
        order = _next(orders)
        if order is None:
            break
        if isinstance(order, int):
            if sidecar is not None:
                sidecar.send(order)
        elif sidecar is None:
            sidecar = _fork(orders, run, order)
            if sidecar is not None:
                poller.register(sidecar.life, select.POLLIN)
    if sidecar is not None:
        sidecar.end()
    return 0


def serve_forked(orders: socket.socket) -> int:
    """`serve` the real sidecar, in a fork of a process with other tasks."""
    os.setpgid(0, 0)
    os.dup2(2, 1)
    _empty_standard_input()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
    # Others learn from the end of pipes that the process has ended. What is registered with
    # multiprocessing's resource tracker needs its pipe.
    kept = {0, 1, 2, orders.fileno(), resource_tracker.getfd()}
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):  # the list itself is closed already
                os.close(number)
    return serve(orders, _program())


def _program() -> Program:
    """The sidecar's program, once its modules are imported."""
    from sglang_qspec.sidecar import __main__, loading  # imports torch

    importlib.import_module("sglang_qspec.sidecar.service")  # which the program imports late
    loading.import_modules()
    return __main__.run_forked


def _fork(orders: socket.socket, run: Program, arguments: Sequence[str]) -> _Sidecar | None:
    """Fork a sidecar, and report its process id; None, and a failure, if the system cannot."""
    server = os.getpid()
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        _report(orders, False, 1)
        return None
    if pid == 0:
        os.close(ours)
        orders.close()
        _end_with(server)
        setproctitle(" ".join([*PROGRAM, *arguments]))
        exit_with(lambda: run(arguments))
    os.close(theirs)
    _report(orders, True, pid)
    return _Sidecar(pid, ours)


class _Sidecar:
    """A sidecar, seen from its fork server."""

    def __init__(self, pid: int, life: int) -> None:
        self._pid = pid
        self.life = life
        """End of a pipe of which the sidecar has the other end, and so closes it when it ends."""

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self._pid, number)

    def reap(self) -> int:
        """Exit code of the sidecar, which has ended or is about to."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self.life)
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """End the sidecar with SIGTERM, and after GRACE_MS with SIGKILL."""
        self.send(signal.SIGTERM)
        poller = select.poll()
        poller.register(self.life, select.POLLIN)
        if not poller.poll(GRACE_MS):
            self.send(signal.SIGKILL)
        self.reap()


def _next(orders: socket.socket) -> list[str] | int | None:
    """The next order; None once the parent has closed its end."""
    try:
        order = orders.recv(LONGEST_ORDER)
    except OSError:
        return None
    decoded: list[str] | int | None = json.loads(order) if order else None
    return decoded


def _report(orders: socket.socket, runs: bool, number: int) -> None:
    with contextlib.suppress(OSError):  # the parent has ended, which the loop notices
        orders.send(REPORT.pack(runs, number))


def _end_with(server: int) -> None:
    """Let the kernel kill this process when its fork server ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def standard_input() -> socket.socket:
    """The socket that is the standard input, which becomes empty."""
    orders = socket.socket(fileno=os.dup(0))
    _empty_standard_input()
    return orders


def _empty_standard_input() -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


if __name__ == "__main__":
    getproctitle()  # a title can be set only if this comes before changes of the environment
    with standard_input() as connection:
        hardware.settle_device("cpu")
        program = _program()
        gc.collect()
        gc.freeze()  # collections in a sidecar would copy the memory of all objects
        exit_with(lambda: serve(connection, program))
