"""A server of SGLang as a child process on this machine, for the commands that need one."""

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
from typing import IO

import psutil

from sglang_qspec.tools.ports import HOST, OwnPort, free_port

START_S = 1800.0
"""Time limit for the start of a server, in seconds; a large model takes minutes."""
STOP_S = 15.0
TAIL = 20
"""Number of lines of the log in an error."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class LocalServer:
    """`python -m sglang.launch_server` on a free port of 127.0.0.1.

    The kernel kills the server when the thread that launched it ends, for example because this
    process is killed. SGLang's other processes and the sidecar then end with their parent. An
    interrupt of the terminal does not reach the server, so whoever launched it decides its end.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """`arguments` are the server's flags without host and port, `log` gets its output.

        The server runs on `cpus`; None means the CPUs of this process.
        """
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        self.log = log
        self._command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        self._command += ["--host", HOST, "--port", str(self._port)]
        self._environment = dict(environment)
        self._cpus = cpus
        self._process: subprocess.Popen[bytes] | None = None
        self._own_port: OwnPort | None = None
        self._launched = time.monotonic()

    @property
    def exit_code(self) -> int | None:
        """The exit code of the server; None before the start and while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def age(self) -> float:
        """Seconds since `launch`."""
        return time.monotonic() - self._launched

    @property
    def has_failed_to_start(self) -> bool:
        """Whether a server that does not answer yet never will: it has ended, or takes too long."""
        return self.exit_code is not None or self.age > START_S

    def launch(self) -> None:
        """Start the process without waiting until it answers."""
        own = os.sched_getaffinity(0)
        self._launched = time.monotonic()
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)  # the server inherits the CPUs
            with self.log.open("ab") as log:
                self._process = self._popen(log)
            self._own_port = OwnPort(self._port, self._process.pid)
        finally:
            os.sched_setaffinity(0, own)

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            process_group=0,
            preexec_fn=_end_with_parent,
        )

    def listens(self) -> bool:
        """Whether this server, and no other process, accepts connections at `url`.

        Clients ask before and after they connect, and send nothing otherwise.
        """
        return self._own_port is not None and self.exit_code is None and self._own_port.is_held()

    def obituary(self) -> str:
        """The end of an error message: why the start failed, and the end of the log."""
        ended = self.exit_code
        what = f"took over {START_S:g} s" if ended is None else f"ended with code {ended}"
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join((f"{what}:", *lines[-TAIL:]))

    def stop(self) -> None:
        """End the server and every process below it."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return  # the id of an ended process may be that of another one
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            for each in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()


def _end_with_parent() -> None:
    """In the new process: let the kernel kill it when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
