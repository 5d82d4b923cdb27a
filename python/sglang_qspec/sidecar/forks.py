"""Starts sidecars by forks of a process that has imported what they need.

The imports take most of the time of a start on a CPU. A *fork server* has done them, has one
thread, and only forks (`sidecar.fork_server`). A sidecar shares the memory of the imports with it.
It is a fork of the scheduler's process, from before that process does anything else
(`engine.sidecar.scheduler_fork`), or a program of its own. Only sidecars on CPUs start so: a
process that has initialized CUDA cannot be forked, and some modules of SGLang do that when they are
imported.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

PROGRAM = (sys.executable, "-m", "sglang_qspec.sidecar.fork_server")
"""Command that starts a fork server."""
LONGEST_ORDER = 1 << 17
"""Maximum size of an order, in bytes. An order is JSON: the arguments of a new sidecar, or the
number of a signal for the sidecar."""
REPORT = struct.Struct("?i")
"""What the fork server reports: whether the sidecar runs, and its process id or its exit code."""
POLL_S = 0.005
"""Time between two looks whether a process has ended, in seconds."""
CLOSE_S = 5.0
"""Time of the fork server to end after its parent has closed its end, in seconds."""


def started(
    command: Sequence[str], environment: Mapping[str, str], stdin: int
) -> subprocess.Popen[bytes]:
    """A new process in a group of its own. Raises OSError if the system cannot start one."""
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=2,  # a server's standard output may carry data
        # Ctrl-C in a terminal must reach only the server. A new session would do that too, but the
        # kernel divides CPU time between sessions first, then by niceness.
        process_group=0,
        env=environment,
    )


class Process(Protocol):
    """What a fork server needs of its own process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkServer:
    """A fork server, seen from its parent.

    Its methods are those of a `subprocess.Popen` of the sidecar that it has forked last.
    """

    def __init__(self, process: Process, orders: socket.socket) -> None:
        """`orders` is the parent's end of the connection to a fork server's process."""
        orders.setblocking(False)
        self._server = process
        self._socket = orders
        self._pid: int | None = None
        """Process id of the latest sidecar; None before the fork server has forked it."""
        self._code: int | None = None
        """Exit code of the latest sidecar; None while it runs."""

    @classmethod
    def as_program(
        cls, environment: Mapping[str, str], program: Sequence[str] = PROGRAM
    ) -> ForkServer:
        """Start a fork server. Raises OSError if the system cannot start a process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            return cls(started(program, environment, theirs.fileno()), ours)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    @classmethod
    def of_this_process(cls, serve: Callable[[socket.socket], int]) -> ForkServer:
        """Fork this process, and let the fork call `serve` with its end of the connection.

        Call it before the process has threads. Raises OSError if the system cannot fork.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            gc.freeze()  # collections in the fork would copy the memory of all objects
            try:
                pid = os.fork()
            except OSError:
                gc.unfreeze()
                ours.close()
                raise
            if pid == 0:
                ours.close()
                exit_with(lambda: serve(theirs))
            gc.unfreeze()
        return cls(_Child(pid), ours)

    def fork(self, arguments: Sequence[str]) -> bool:
        """Order a sidecar with these arguments; the latest one must have ended.

        Returns False if the fork server has ended.
        """
        if self._server.poll() is not None:
            return False
        self._pid = self._code = None
        self._send(list(arguments))
        return True

    @property
    def pid(self) -> int:
        """Process id of the sidecar; that of the fork server before the fork."""
        self._receive()
        return self._server.pid if self._pid is None else self._pid

    def poll(self) -> int | None:
        """The exit code, as of `subprocess.Popen`; None while the sidecar or its start runs."""
        self._receive()
        # A sidecar does not outlive the fork server.
        return self._server.poll() if self._code is None else self._code

    def wait(self, timeout: float = math.inf) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        return _exit_code(self.poll, timeout)

    def terminate(self) -> None:
        """Send the sidecar SIGTERM, or end a fork server that has not forked it yet."""
        self._receive()
        if self._pid is None:
            self._server.terminate()
        else:
            self._send(int(signal.SIGTERM))

    def kill(self) -> None:
        """Kill the sidecar and its fork server."""
        self._server.kill()

    def close(self, grace_s: float = CLOSE_S) -> None:
        """End the fork server, and with it the sidecar if it still runs.

        After `grace_s` seconds they are killed.
        """
        self._socket.close()
        try:
            self._server.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _send(self, order: list[str] | int) -> None:
        with contextlib.suppress(OSError):  # the fork server has ended, which `poll` reports
            self._socket.send(json.dumps(order).encode())

    def _receive(self) -> None:
        """Read all reports. There are none after the end of the fork server."""
        with contextlib.suppress(OSError):
            while report := self._socket.recv(REPORT.size):
                runs, number = REPORT.unpack(report)
                self._pid, self._code = (number, None) if runs else (self._pid, number)


class _Child:
    """A fork of this process, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code has read the exit code, so it is not known
                pid, status = self.pid, 0
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        return _exit_code(self.poll, math.inf if timeout is None else timeout)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _exit_code(poll: Callable[[], int | None], timeout: float) -> int:
    """What `poll` returns once it is not None. Raises subprocess.TimeoutExpired."""
    deadline = time.monotonic() + timeout
    while (code := poll()) is None:
        if time.monotonic() >= deadline:
            raise subprocess.TimeoutExpired("the sidecar", timeout)
        time.sleep(POLL_S)
    return code


def exit_with(run: Callable[[], int]) -> NoReturn:
    """End this process, a fork, with the exit code that `run` returns.

    Nothing that the process has inherited is cleaned up.
    """
    code = 1
    try:
        code = run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 -- the fork must not continue as its parent
        traceback.print_exc()
    finally:
        logging.shutdown()
        os._exit(code)
