"""Forks sidecars from a process that has imported what they need: a restart imports nothing.

The imports take most of the time of a start on a CPU. The *fork server* is a child of the process
that wants a sidecar. It imports the modules and then only forks: its memory is shared with its
sidecar, as long as neither changes it. Both ends talk over a socket, which is the standard input of
the fork server. Only sidecars on CPUs start so: a process that has initialized CUDA cannot be
forked, and some modules of SGLang do that when they are imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from setproctitle import setproctitle

FLAG = "--fork-server"
"""Option of a sidecar's command that makes the process a fork server."""
TITLE = "sglang-qspec::fork-server"
"""Name of the fork server in a list of processes, once it has imported the modules."""
ORDER = struct.Struct("i")
"""An order: the number of a signal for the sidecar, or FORK."""
FORK = 0
"""The order to fork a sidecar."""
REPORT = struct.Struct("?i")
"""What the fork server reports: whether the sidecar runs, and its process id or its exit code."""
LOOK_MS = 500
"""Time between two checks of the fork server that its parent lives, in milliseconds."""
GRACE_MS = 10_000
"""Time of a sidecar to end after its server has ended, in milliseconds."""
CLOSE_S = 5.0
"""Time of the fork server to end after its parent has closed its end, in seconds."""
_PR_SET_PDEATHSIG = 1


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


class ForkServer:
    """The fork server, seen from its parent.

    Its methods are those of a `subprocess.Popen` of the sidecar that it has forked last.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the fork server of the sidecar that `command` starts, and order a sidecar.

        Raises OSError if the system cannot start a process.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._pid: int | None = None
        """Process id of the latest sidecar; None before the fork server has forked it."""
        self._code: int | None = None
        """Exit code of the latest sidecar; None while it runs."""
        try:
            self._server = started([*command, FLAG], environment, theirs.fileno())
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._send(FORK)

    def fork(self) -> bool:
        """Order another sidecar after the end of the latest one.

        Returns False if the fork server has ended.
        """
        if self._server.poll() is not None:
            return False
        self._pid = self._code = None
        self._send(FORK)
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
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self._server.args, timeout)
            if self._has_reported(left) and not self._receive():
                self._server.wait()  # it has closed its end
        return code

    def terminate(self) -> None:
        """Send the sidecar SIGTERM, or end a fork server that has not forked it yet."""
        self._receive()
        if self._pid is None:
            self._server.terminate()
        else:
            self._send(signal.SIGTERM)

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

    def _send(self, order: int) -> None:
        with contextlib.suppress(OSError):  # the fork server has ended, which `poll` reports
            self._socket.send(ORDER.pack(order))

    def _has_reported(self, seconds: float) -> bool:
        """Whether there is a report, or the fork server's end, within `seconds`."""
        limit = None if seconds == math.inf else seconds
        return bool(select.select([self._socket], [], [], limit)[0])

    def _receive(self) -> bool:
        """Read all reports. Returns False at the end of the fork server."""
        while True:
            try:
                report = self._socket.recv(REPORT.size)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not report:
                return False
            runs, number = REPORT.unpack(report)
            self._pid, self._code = (number, None) if runs else (self._pid, number)


def serve(run: Callable[[], int], title: str) -> int:
    """Fork a process for each order that comes by standard input, until the parent ends.

    Call it in the main thread, once all modules are imported. It returns what `run` returns in each
    fork, and 0 in this process when the parent has ended or closed its end. `title` is that of the
    forks in a list of processes.
    """
    setproctitle(TITLE)
    parent = os.getppid()
    with _standard_input() as orders:
        gc.collect()
        gc.freeze()  # collections in a fork would copy the memory of all objects
        poller = select.poll()
        poller.register(orders, select.POLLIN)
        sidecar: _Sidecar | None = None
        while os.getppid() == parent:
            ready = {number for number, _ in poller.poll(LOOK_MS)}
            if sidecar is not None and sidecar.descriptor in ready:
                poller.unregister(sidecar.descriptor)
                _report(orders, False, sidecar.reap())
                sidecar = None
            if orders.fileno() not in ready:
                continue
            order = _next(orders)
            if order is None:
                break
            if order != FORK:
                if sidecar is not None:
                    sidecar.send(order)
            elif sidecar is None:
                server = os.getpid()
                try:
                    pid = os.fork()
                except OSError:
                    _report(orders, False, 1)
                    continue
                if pid == 0:
                    orders.close()
                    _end_with(server)
                    setproctitle(title)
                    return run()
                sidecar = _Sidecar(pid)
                poller.register(sidecar.descriptor, select.POLLIN)
                _report(orders, True, pid)
        if sidecar is not None:
            sidecar.end()
    return 0


class _Sidecar:
    """A sidecar, seen from its fork server."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.descriptor = os.pidfd_open(pid)
        """Becomes readable when the sidecar ends."""

    def send(self, signal_number: int) -> None:
        os.kill(self._pid, signal_number)

    def reap(self) -> int:
        """Exit code of the sidecar, which has ended or is about to."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """End the sidecar with SIGTERM, and after GRACE_MS with SIGKILL."""
        self.send(signal.SIGTERM)
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        if not poller.poll(GRACE_MS):
            self.send(signal.SIGKILL)
        self.reap()


def _standard_input() -> socket.socket:
    """The socket that is the standard input, which becomes empty."""
    orders = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return orders


def _next(orders: socket.socket) -> int | None:
    """The next order; None once the parent has closed its end."""
    try:
        order = orders.recv(ORDER.size)
    except OSError:
        return None
    return int(ORDER.unpack(order)[0]) if order else None


def _report(orders: socket.socket, runs: bool, number: int) -> None:
    with contextlib.suppress(OSError):  # the parent has ended, which the loop notices
        orders.send(REPORT.pack(runs, number))


def _end_with(server: int) -> None:
    """Let the kernel kill this process when its fork server ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
