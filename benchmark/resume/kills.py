"""Kills the client, the server or the sidecar of a batch."""

from __future__ import annotations

import contextlib
import math
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmark.harness.output import say
from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import sidecar_of, state_of
from benchmark.resume.batches import Answers, answers_of, command_of

VICTIMS = ("client", "server", "sidecar")
POLL_S = 0.05
START_S = 600.0
"""Limit of a start of the server."""
LOOK_S = 0.5
"""Seconds between two looks at the state of the sidecar."""


@dataclass(frozen=True)
class Killed:
    """A batch that was killed."""

    answers: Answers
    """Its time is without starts of the server."""
    kills: int
    server_s: float
    """Mean time from the kill of the server until it answers again; 0 if it was not killed."""
    sidecar_s: float
    """Mean time without a sidecar after a kill, until the end of the batch at most;
    0 if it always had one."""


class KilledBatch:
    """Runs a batch, and kills one of its processes at equal intervals."""

    def __init__(self, server: Server, path: Path, output: Path, *more: str) -> None:
        """Start it; `more` are further options of the command."""
        self._server = server
        self._output = output
        self._command = command_of(server.url, path, output, "--resume", *more)
        self._client = self._new_client()
        self._down: list[float] = []
        """Times in which the server started again, in seconds."""
        self._absent: list[float] = []
        """Times without a sidecar."""
        self._start: threading.Thread | None = None
        """Waits until the server that starts again is ready."""
        self._absent_since: float | None = None
        self._look_at = 0.0

    def run(self, victim: str, kills: int, interval: float) -> Killed:
        """Kill `victim`, one of VICTIMS, `kills` times. Raises RuntimeError if the batch fails."""
        kill: Mapping[str, Callable[[], None]] = {
            "client": self._kill_client,
            "server": self._kill_server,
            "sidecar": self._kill_sidecar,
        }
        began, done = time.monotonic(), 0
        try:
            for _ in range(kills):
                self._wait(began + sum(self._down) + (done + 1) * interval)
                if self._client.poll() is not None:
                    say(f"  the batch ended before the {victim} was killed")
                    break
                say(f"  killing the {victim}")
                kill[victim]()
                done += 1
            self._wait(math.inf)
            ended = time.monotonic()
            if self._absent_since is not None:
                self._absent.append(ended - self._absent_since)
        finally:
            self._client.kill()
            if self._start is not None:
                self._start.join()
        if self._client.wait() != 0:
            raise RuntimeError(f"the batch ended with status {self._client.returncode}")
        answers = answers_of(self._output, ended - began - sum(self._down))
        return Killed(answers, done, _mean(self._down), _mean(self._absent))

    def _wait(self, due: float) -> None:
        """Wait until a time, or until the client ends."""
        while self._client.poll() is None and time.monotonic() < due:
            time.sleep(POLL_S)
            self._look()

    def _look(self) -> None:
        """Note the end of a time without a sidecar."""
        now = time.monotonic()
        if self._absent_since is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        if state_of(self._server)["sidecar"] == "ready":
            self._absent.append(now - self._absent_since)
            self._absent_since = None

    def _lose_sidecar(self) -> None:
        self._absent_since = time.monotonic()
        self._look_at = self._absent_since + 2.0  # by then the server has noticed

    def _new_client(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def _kill_client(self) -> None:
        self._client.kill()
        self._client.wait()
        self._client = self._new_client()

    def _kill_sidecar(self) -> None:
        sidecar_of(self._server).kill()
        self._lose_sidecar()

    def _kill_server(self) -> None:
        began = time.monotonic()
        for process in self._server.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._server.exit_code(60.0)
        self._server.launch()
        self._await_answer()
        self._down.append(time.monotonic() - began)
        self._lose_sidecar()
        # It ends with an answer to a request, which waits behind the lines of the batch.
        self._start = threading.Thread(target=self._server.start)
        self._start.start()

    def _await_answer(self) -> None:
        """Wait until the server answers what the client asks it first. Raises RuntimeError."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._server.exit_code() is None:
            try:
                state_of(self._server)
            except (ServerError, OSError):
                time.sleep(POLL_S)
            else:
                return
        raise RuntimeError("the server does not start again")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
