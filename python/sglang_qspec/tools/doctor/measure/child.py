"""The doctor's end of a process that runs passes of one model (`passes`)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from sglang_qspec.config import environment_with_gpus
from sglang_qspec.errors import MeasureError

MODULE = "sglang_qspec.tools.doctor.measure.passes"


@contextlib.contextmanager
def open_child(role: str, visible: str | None, *options: str) -> Iterator[Child]:
    """Start a process that loads a model; `visible` is its CUDA_VISIBLE_DEVICES.

    The end of the context ends the process, without waiting for a pass that runs.
    """
    command = [sys.executable, "-W", "ignore", "-m", MODULE, *options]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment_with_gpus(visible),
            text=True,
        ) as process,
    ):
        try:
            yield Child(role, process, log)
        finally:
            process.kill()


class Child:
    """A process with one loaded model. `ask` and `answer` call its methods one by one."""

    def __init__(self, role: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        """`log` is the standard error of the process."""
        self._role = role
        self._process = process
        self._log = log

    def ask(self, method: str, **arguments: Any) -> None:
        """Send a call, without waiting for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why the process ended
            self._process.stdin.write(json.dumps({"do": method, **arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The answer to the oldest call without one. Raises MeasureError if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise MeasureError(f"the {self._role} cannot be measured: {self._last_words()}")
        content = json.loads(line)
        if "error" in content:
            raise MeasureError(f"the {self._role} cannot be measured: {content['error']}")
        return content["result"]

    def call(self, method: str, **arguments: Any) -> Any:
        """The answer of a method."""
        self.ask(method, **arguments)
        return self.answer()

    def _last_words(self) -> str:
        """The last line that the process printed, and its exit code."""
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"{lines[-1] if lines else 'its process ended'} (exit code {code})"
