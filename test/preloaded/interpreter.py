"""Starts Python programs in forks of a process that has imported SGLang, so they import nothing.

A server is three or four processes, and each spends most of the CPU time of its start on the same
imports. `Popen` is `subprocess.Popen`, but if its command is a Python program of a server, a
*preloaded* process forks, and the fork runs the program (`image`). The new process is a child of
the caller like any other: the process between the two ends at once, and the caller is the
subreaper that gets the orphan.

Each such process first forks a preloaded process of its own. So the programs that it starts, with
`subprocess` or with `multiprocessing`, begin as fresh as it did itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[2]
_LIBC = ctypes.CDLL(None)
_PR_SET_CHILD_SUBREAPER = 36
PROGRAMS = {
    "sglang.launch_server",
    "sglang_qspec",
    "sglang_qspec.sidecar",
    "sglang_qspec.sidecar.fork_server",
    "sglang_qspec.tools.measure.loaded_model",
    "test.engine.cuda.serving",
    "test.engine.families.parity",
    "test.engine.passes.prefilling",
}
"""Modules that the image can run with `-m`."""
SIZE = struct.Struct("q")
"""Size of an encoded command, and the answer: the new process's id, or a negative error number."""
READ_AT_IMPORT = {
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": (
        "sglang.srt.managers.schedule_policy",
        "CLIP_MAX_NEW_TOKENS",
        4096,
    )
}
"""Module, variable and default of the settings that SGLang reads when it is imported."""
READ_EARLY = ("SGLANG_", "TORCH", "CUDA_", "HF_")
"""Beginnings of the names of other variables that modules may read when they are imported."""
READ_LATER = ("SGLANG_QSPEC_", "SGLANG_TEST_RETRACT", "SGLANG_CPU_OMP_THREADS_BIND")
"""Beginnings of the names of those that are read later."""
UNSUITED = {"QSPEC_TEST_SLOW", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"}
"""Variables for code that must run at the start of each process."""


@dataclass(frozen=True)
class Command:
    """What a fork of the image runs."""

    arguments: tuple[str, ...]
    """Those of Python, with `-m` or `-c`."""
    environment: dict[str, str]
    folder: str
    cpus: set[int]
    files: tuple[int, int]
    """Soft and hard limit of open files."""
    descriptors: tuple[int, ...]
    """Numbers, in the new process, of the file descriptors that come with the command."""
    parent: int
    """Process id of the caller."""
    own_group: bool = False
    prepare: tuple[str, tuple[Any, ...]] | None = None
    """Name of a function that the new process calls first, as `pkgutil.resolve_name` takes it, and
    its arguments."""


class Interpreter:
    """The caller's end of the connection to a preloaded process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def start(
        self,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        own_group: bool = False,
        prepare: Callable[[], object] | None = None,
    ) -> int:
        """Run Python with `arguments` in a child of this process; returns its process id.

        `descriptors` are file descriptors of this process by their numbers in the new one. Raises
        OSError if the system cannot start a process.
        """
        command = Command(
            tuple(arguments),
            dict(os.environ if environment is None else environment),
            os.fspath(folder or os.getcwd()),
            os.sched_getaffinity(0),
            resource.getrlimit(resource.RLIMIT_NOFILE),
            tuple(descriptors),
            os.getpid(),
            own_group,
            None if prepare is None else _named(prepare),
        )
        data = msgspec.msgpack.encode(command)
        with self._lock, _adopting():
            socket.send_fds(self._connection, [SIZE.pack(len(data))], [*descriptors.values()])
            self._connection.sendall(data)
            answer = self._connection.recv(SIZE.size, socket.MSG_WAITALL)
        if len(answer) < SIZE.size:
            raise ChildProcessError("the preloaded process has ended")
        (pid,) = SIZE.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return int(pid)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """A context in which orphans among the descendants become children of this process."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


_interpreter: Interpreter | None = None
_starting = threading.Lock()


def use(interpreter: Interpreter) -> None:
    """Start this process's programs with `interpreter`."""
    global _interpreter
    _interpreter = interpreter


def preloaded() -> Interpreter:
    """This process's preloaded process, which starts at the first call."""
    with _starting:
        if _interpreter is None:
            use(_load())
    assert _interpreter is not None
    return _interpreter


def _load() -> Interpreter:
    ours, theirs = socket.socketpair()
    log = tempfile.NamedTemporaryFile(prefix="preloaded-", suffix=".log")  # noqa: SIM115
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "test.preloaded.image", str(theirs.fileno())],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(theirs.fileno(),),
        process_group=0,
    )
    theirs.close()
    if ours.recv(1) != b"!":
        raise ChildProcessError(f"the imports failed:\n{Path(log.name).read_text()}")

    def close() -> None:
        ours.close()
        process.kill()
        process.wait()
        log.close()

    atexit.register(close)
    return Interpreter(ours)


def suits(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a fork of the image does the same as a new process with this command.

    Perhaps it also prints warnings that the command switches off.
    """
    program, *options = command
    if options[:2] == ["-W", "ignore"]:
        options = options[2:]
    if program != sys.executable or options[:1] != ["-m"] or not PROGRAMS & {*options[1:2]}:
        return False
    if environment.get("SGLANG_USE_CPU_ENGINE") != "1" or UNSUITED & environment.keys():
        return False
    return not any(
        environment.get(name) != os.environ.get(name)
        for name in environment.keys() | os.environ.keys()
        if name.startswith(READ_EARLY)
        if name not in READ_AT_IMPORT and not name.startswith(READ_LATER)
    )


def output_of(module: str, given: object, **variables: str) -> Any:
    """What a program of PROGRAMS prints on a line of JSON, if its standard input is `given`.

    `given` is encoded as JSON, and `variables` are added to the environment.
    """
    with Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
    ) as process:
        output, errors = process.communicate(json.dumps(given), timeout=600)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output)


def _named(function: Callable[[], object]) -> tuple[str, tuple[Any, ...]]:
    """The name and the arguments of a function of a module, or of a `partial` of one."""
    called, given = function, ()
    if isinstance(function, partial):
        called, given = function.func, function.args
    return f"{called.__module__}:{called.__qualname__}", given


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that starts a server's programs preloaded.

    `preexec_fn` must be a function of a module then, or a `partial` of one.
    """

    def _execute_child(self, args: Any, executable: Any, *given: Any) -> None:
        prepare, _close_fds, _pass_fds, folder, environment, _, _, shell, *more = given
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, process_group = more
        if environment is None:
            environment = os.environ
        if shell or executable is not None or not suits(args, environment):
            super()._execute_child(args, executable, *given)  # type: ignore[misc]
            return
        ends = enumerate((p2cread, c2pwrite, errwrite))
        self.pid = preloaded().start(
            args[1:],
            {number: number if end == -1 else end for number, end in ends},
            environment=environment,
            folder=folder,
            own_group=process_group == 0,
            prepare=prepare,
        )
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )
