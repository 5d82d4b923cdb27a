"""Starts a real SGLang server for a benchmark or a test, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
START_SECONDS = 300.0
STOP_SECONDS = 15.0
CRASH_SECONDS = 5.0
"""That a server takes to end once it has failed a request for good."""


class ServerError(RuntimeError):
    """The server did not start, or answered with an error; the message holds the log's end."""


class Server:
    """`python -m sglang.launch_server` on a free port of 127.0.0.1, as a context manager.

    `arguments` are the server's flags without host, port and model. `cores` pins the server's
    processes (a sidecar pins itself) and sets their number of threads. `environment` is added to
    that of this process. `launcher` is what Python runs.
    """

    def __init__(
        self,
        model: Path | str,
        arguments: Sequence[str] = (),
        *,
        cores: Sequence[int] = (),
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable,
            *launcher,
            "--model-path",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *arguments,
        ]
        self._cores = tuple(cores)
        self._environment = dict(os.environ, **(environment or {}))
        if cores:
            self._environment["OMP_NUM_THREADS"] = str(len(cores))
        self._log = tempfile.NamedTemporaryFile(prefix="sglang-server-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            # An interrupt too: the server is in a session of its own and would live on.
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """All that the server has printed so far."""
        return Path(self._log.name).read_text(errors="replace")

    @property
    def processes(self) -> list[psutil.Process]:
        """The server and all processes below it."""
        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def start(self) -> None:
        """Start, unless `launch` has, and wait until a request would be served.

        Raises ServerError.
        """
        if self._process is None:
            self.launch()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.exit_code() is not None:
                raise ServerError(f"the server ended with code {self.exit_code()}:\n{self._tail()}")
            try:
                urllib.request.urlopen(self.url + "/health_generate", timeout=30).read()
            except OSError:
                time.sleep(0.25)
            else:
                self._pin()
                return
        tail = self._tail()
        self.stop()
        raise ServerError(f"the server was not ready after {START_SECONDS:g} s:\n{tail}")

    def launch(self) -> None:
        """Start without waiting; from a thread that lives as long as the server is to."""
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # Not in a session of its own: the kernel shares processors between sessions first, and
            # a client could starve beside a scheduler that polls without rest.
            process_group=0,
            preexec_fn=_end_with_parent,
        )

    def _pin(self) -> None:
        """Give the server's threads its cores; processes that chose others, a sidecar, keep theirs.

        Only once it is started: with one core that alone would take twice as long.
        """
        everywhere = os.sched_getaffinity(0)
        for process in self.processes if self._cores else ():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.sched_getaffinity(process.pid) == everywhere:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, self._cores)

    def pause(self) -> None:
        """Stop all processes, so that they use no processor until `resume`.

        An idle scheduler would otherwise poll without rest.
        """
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Let all processes go on."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def exit_code(self, timeout: float = 0.0) -> int | None:
        """The launcher's exit code, or None while it runs."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def explain(self, error: Exception) -> Exception:
        """The error, or one with the end of the log if the server has ended meanwhile."""
        if self.exit_code(CRASH_SECONDS) is None:
            return error
        return ServerError(f"the server ended with code {self.exit_code()}:\n{self._tail()}")

    def stop(self) -> None:
        """End every process that this server started, those first that it knows best how to end."""
        processes = self.processes
        if self._process is not None and self._process.poll() is None:
            # What is stopped would not notice.
            self.resume()
            self._process.send_signal(signal.SIGTERM)
            self.exit_code(STOP_SECONDS)
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=STOP_SECONDS)

    def post(self, path: str, body: dict[str, Any], timeout: float = 600.0) -> Any:
        """The answer to a JSON request, decoded if it is JSON.

        Raises ServerError, which holds the status code and the text of the answer.
        """
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._open(request, timeout)

    def stream(
        self, path: str, body: dict[str, Any], timeout: float = 600.0
    ) -> Iterator[dict[str, Any]]:
        """The pieces of a streamed answer to a JSON request, as they come; errors as in post."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                for line in response:
                    data = line.decode().removeprefix("data: ").strip()
                    if data and data != "[DONE]":
                        piece = json.loads(data)
                        if "error" in piece:
                            raise ServerError(str(piece["error"]))
                        yield piece
        except urllib.error.HTTPError as error:
            raise ServerError(f"HTTP {error.code}: {error.read().decode()}") from error

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """The answer to a GET, decoded if it is JSON; errors as in post."""
        return self._open(urllib.request.Request(self.url + path), timeout)

    def _open(self, request: urllib.request.Request, timeout: float) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read().decode()
                is_json = "json" in response.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            raise ServerError(f"HTTP {error.code}: {error.read().decode()}") from error
        return json.loads(text) if is_json else text

    def _tail(self) -> str:
        return "\n".join(self.log.splitlines()[-40:])


def _end_with_parent() -> None:
    """In the server before its program: be killed if this process ends without stopping it.

    SGLang's own processes, and the sidecar unless it is paused, then end with their parents.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def reason(error: Exception) -> str:
    """One line of an error that may hold a server's log: the last that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "xception" in line]
    found = (telling or lines or [type(error).__name__])[-1]
    return found[:300]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
