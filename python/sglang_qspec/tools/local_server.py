"""A server of SGLang as child processes on this machine, for whatever needs one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from sglang_qspec.tools.ports import HOST, OwnPort, free_port

START_S = 1800.0
"""Time limit for the start of a server, in seconds; a large model takes minutes."""
TAIL = 40
"""Number of lines of the log in an error."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class LocalServer:
    """`python -m sglang.launch_server` on a free port of 127.0.0.1.

    The kernel kills the server when the thread that launched it ends, for example because this
    process is killed. SGLang's other processes and the sidecar then end with their parent. An
    interrupt of the terminal does not reach the server, so whoever launched it decides its end.
    """

    popen: type[subprocess.Popen[bytes]] = subprocess.Popen
    """Starts the server's first process."""
    stop_seconds = 15.0
    """Time limit for the end of a server that is asked to end, in seconds."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        cpus: frozenset[int] | None = None,
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> None:
        """`arguments` are the server's flags without host and port, `log` gets its output.

        The server runs on `cpus`; None means the CPUs of this process. `launcher` is what Python
        runs.
        """
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.command = [sys.executable, *launcher, *arguments]
        self.command += ["--host", HOST, "--port", str(self.port)]
        self._environment = dict(environment)
        self._log_file = log
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._own_port: OwnPort | None = None
        self._launched = time.monotonic()

    @property
    def log(self) -> str:
        """The server's output so far."""
        return self._log_file.read_text(errors="replace")

    @property
    def age(self) -> float:
        """Seconds since `launch`."""
        return time.monotonic() - self._launched

    @property
    def has_failed_to_start(self) -> bool:
        """Whether a server that does not answer yet never will: it has ended, or takes too long."""
        return self.exit_code() is not None or self.age > START_S

    @property
    def processes(self) -> list[psutil.Process]:
        """The server and all processes below it; none before the start and after the end."""
        if self._process is None or self._process.poll() is not None:
            return []  # the id of an ended process may be that of another one
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def exit_code(self, timeout: float = 0.0) -> int | None:
        """The exit code of the server, after a wait of `timeout` seconds at most.

        None before the start and while the server runs.
        """
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def launch(self) -> None:
        """Start the first process without waiting until it answers."""
        own = os.sched_getaffinity(0)
        self._launched = time.monotonic()
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)  # the server inherits the CPUs
            with self._log_file.open("ab") as log:
                self._process = self.popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    # A process group keeps an interrupt from the server. A session would too, but
                    # the kernel shares processors among sessions first, and a client could starve
                    # beside a scheduler that polls all the time.
                    process_group=0,
                    preexec_fn=end_with_parent,
                )
            self._own_port = OwnPort(self.port, self._process.pid)
        finally:
            os.sched_setaffinity(0, own)

    def listens(self) -> bool:
        """Whether this server, and no other process, accepts connections at `url`.

        Clients ask before and after they connect, and send nothing otherwise.
        """
        return self._own_port is not None and self.exit_code() is None and self._own_port.is_held()

    def obituary(self) -> str:
        """The end of an error message: why the server does not answer, and the end of the log."""
        ended = self.exit_code()
        what = f"took over {self.age:.0f} s" if ended is None else f"ended with code {ended}"
        return "\n".join((f"{what}:", *self.log.splitlines()[-TAIL:]))

    def stop(self) -> None:
        """End the server, which may end its processes first, and every process below it."""
        processes = self.processes
        if self._process is None or not processes:
            return
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()  # a paused process does not receive the signal
        self._process.send_signal(signal.SIGTERM)
        self.exit_code(self.stop_seconds)
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()
        psutil.wait_procs(processes[1:], timeout=self.stop_seconds)


def end_with_parent() -> None:
    """In a new process: let the kernel kill it when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
