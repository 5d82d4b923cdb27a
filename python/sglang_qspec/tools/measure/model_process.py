"""A process that runs passes of one model (`loaded_model`), seen from the command that started it.

SGLang has one configuration per process, so each measured model has a process of its own.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from sglang_qspec.config import environment_with_gpus
from sglang_qspec.errors import MeasureError

MODULE = "sglang_qspec.tools.measure.loaded_model"
CONTEXT = 128
"""Default number of tokens before the first token of a timed pass."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which model a process loads, where, and how."""

    path: str
    device: str = ""
    """`cpu`, or `cuda:N`, numbered among the visible GPUs; empty for SGLang's choice."""
    cores: str = ""
    """CPUs to run on; empty for all."""
    shared: str = ""
    """CPUs of the sidecar, which a target can use too."""
    dtype: str = "auto"
    quantization: str | None = None
    """SGLang's quantization method; None selects the checkpoint's."""
    load_format: str | None = None
    """SGLang's format of the weights, such as dummy for random ones; None selects by the files."""
    attention_backend: str | None = None
    """SGLang's attention backend; None selects that of a sidecar."""
    trust_remote_code: bool = False
    mem_fraction: float = 0.0
    """Fraction of the device's memory; 0 for the default of a sidecar."""
    tokens: int = 16384
    """Maximum number of KV slots."""
    context_len: int | None = None
    """Maximum length of a text, in tokens; None selects the model's maximum."""
    rows: int = 256
    """Maximum number of open rows."""
    target: bool = False
    """Whether the model computes as a target does."""
    background: bool = False
    """Whether the process runs only while nothing else wants the CPUs."""
    halves_threads: bool = False
    """Whether the model has half the threads, as a sidecar that shares its CPUs."""
    contexts: list[list[int]] = msgspec.field(default_factory=lambda: [list(range(CONTEXT))])
    """Token ids before the timed passes, for one row after another; then again from the first. Rows
    with the same context share its KV."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer of the target."""

    prompt_ids: list[int]
    token_ids: list[int]
    seed: int | None = None
    """Sampling seed; None for a greedy answer."""


@contextlib.contextmanager
def open_model(role: str, options: ModelOptions, visible: str | None) -> Iterator[ModelProcess]:
    """Start a process that loads a model; `visible` is its CUDA_VISIBLE_DEVICES.

    The end of the context ends the process, without waiting for a pass that runs.
    """
    encoded = msgspec.json.encode(options).decode()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", MODULE, encoded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment_with_gpus(visible),
        ) as process,
    ):
        try:
            yield ModelProcess(role, process, log)
        finally:
            process.kill()


class ModelProcess:
    """A process with one loaded model. `ask` and `answer` call its methods one by one."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], log: IO[str]) -> None:
        """`role` names the model in errors; `log` is the standard error of the process."""
        self._role = role
        self._process = process
        self._log = log

    def ask(self, method: str, **arguments: Any) -> None:
        """Send a call, without waiting for its answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why the process ended
            self._process.stdin.write(msgspec.json.encode({"do": method, **arguments}) + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The answer to the oldest call without one. Raises MeasureError if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise MeasureError(f"the {self._role} cannot be measured: {self._last_words()}")
        content = msgspec.json.decode(line)
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
