"""Kills the client, the server and the sidecar of a batch in turn."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from benchmark.harness.output import say
from benchmark.harness.server import Server
from benchmark.harness.speculation import sidecar_of
from benchmark.resume.batches import Answers, answers_of, command_of

VICTIMS = ("client", "server", "sidecar")
POLL_S = 0.05


class KilledBatch:
    """Runs a batch, and kills its processes at equal intervals."""

    def __init__(self, server: Server, path: Path, output: Path, *more: str) -> None:
        """Start it; `more` are further options of the command."""
        self._server = server
        self._output = output
        self._command = command_of(server.url, path, output, "--resume", *more)
        self._client = self._new_client()
        self._down = 0.0
        """Seconds in which the server started again."""

    def run(self, victims: Sequence[str], interval: float) -> tuple[Answers, int]:
        """The answers, and the number of kills. The time is without starts of the server.

        `victims` are names of VICTIMS, in the order of their kills. Raises RuntimeError if the
        batch fails.
        """
        kill: Mapping[str, Callable[[], None]] = {
            "client": self._kill_client,
            "server": self._kill_server,
            "sidecar": lambda: sidecar_of(self._server).kill(),
        }
        began, kills = time.monotonic(), 0
        try:
            for name in victims:
                due = began + self._down + (kills + 1) * interval
                while self._client.poll() is None and time.monotonic() < due:
                    time.sleep(POLL_S)
                if self._client.poll() is not None:
                    say(f"  the batch ended before the {name} was killed")
                    break
                say(f"  killing the {name}")
                kill[name]()
                kills += 1
            status = self._client.wait()
        finally:
            self._client.kill()
        if status != 0:
            raise RuntimeError(f"the batch ended with status {status}")
        return answers_of(self._output, time.monotonic() - began - self._down), kills

    def _new_client(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def _kill_client(self) -> None:
        self._client.kill()
        self._client.wait()
        self._client = self._new_client()

    def _kill_server(self) -> None:
        began = time.monotonic()
        for process in self._server.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._server.exit_code(60.0)
        self._server.launch()
        self._server.start()
        self._down += time.monotonic() - began
