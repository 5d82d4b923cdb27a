"""`python -m test.preloaded.image DESCRIPTOR`: a process that has imported what servers import.

It forks for each command that comes through the socket, and the fork runs the command.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import importlib
import importlib.abc
import importlib.util
import multiprocessing.util
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import setproctitle

from test.preloaded.interpreter import (
    READ_AT_IMPORT,
    SIZE,
    Command,
    Interpreter,
    Popen,
    preloaded,
    use,
)
from test.preloaded.tokenizers import Tokenizers

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
ROLES = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
)
"""Modules by which a process knows what it is: each fork imports those that its program imports."""
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang_qspec.engine.passes.worker",
    "sglang_qspec.sidecar.draft_model",
    "sglang_qspec.sidecar.loop",
    "benchmark.harness.server",
)
AWAY = "preloaded:"
"""Beginning of a module's name in `sys.modules` before the process imports the module. SGLang
changes the names that modules have imported, of all modules there."""
HIGH = 512
"""Lowest number of file descriptors that must not be in the way of those of a command."""


class Away(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets a process import the modules of ROLES, which are loaded but not in `sys.modules`."""

    def __init__(self) -> None:
        for name in ROLES:
            sys.modules[AWAY + name] = sys.modules.pop(name)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if AWAY + name not in sys.modules:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = sys.modules.pop(AWAY + spec.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        module.__loader__ = self._spec.loader if self._spec else None


class Names:
    """SGLang's search for all names of a function that a hook replaces, with an index.

    SGLang searches all names of all modules once for each hook. That would be a quarter of the CPU
    time of a preloaded start.
    """

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._names: dict[int, list[tuple[ModuleType, str]]] = {}
        for module in _modules(self._modules):
            # `isinstance` would ask lazy objects for their class, which adds names to modules.
            for name, value in list(vars(module).items()):
                if type(value) is FunctionType and (value.__module__ or "").startswith("sglang"):
                    self._names.setdefault(id(value), []).append((module, name))

    def __call__(self, original: object, wrapped: object, source: object) -> int:
        found = [pair for pair in self._names.get(id(original), ()) if pair[0] is not source]
        for module in _modules(sys.modules.keys() - self._modules):
            if module is not source:
                names = [name for name, value in list(vars(module).items()) if value is original]
                found += [(module, name) for name in names]
        for module, name in found:
            if vars(module).get(name) is original:
                setattr(module, name, wrapped)
        return len(found)


def _modules(names: Collection[str]) -> list[ModuleType]:
    found = [sys.modules[name] for name in names]
    return [module for module in found if isinstance(module, ModuleType)]


class Image:
    """The state of a process in which SGLang is imported, and nothing has begun."""

    def __init__(self) -> None:
        # It finds the place of the title only before the environment changes.
        setproctitle.setproctitle("preloaded")
        before = dict(os.environ)
        gc.disable()
        from sglang_qspec.cpu.install import install_kernels

        install_kernels()
        for name in MODULES:
            importlib.import_module(name)
        from sglang_qspec.engine.start import hooks

        for table in (hooks.front, hooks.detokenizer, hooks.scheduler):
            table()
        import torch

        self._threads = torch.get_num_threads()
        self._environment = {k: v for k, v in os.environ.items() if before.get(k) != v}
        self._path = [entry for entry in sys.path if entry not in _python_path()]
        sys.meta_path.insert(0, Away())
        hook_registry = sys.modules["sglang.srt.plugins.hook_registry"]
        hook_registry._propagate_patch = names = Names()  # type: ignore[attr-defined]
        from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

        self.tokenizers = Tokenizers(get_tokenizer)
        names(get_tokenizer, self.tokenizers, None)
        sys.modules.pop("sglang.launch_server")
        gc.freeze()
        gc.enable()

    def become(self, command: Command) -> None:
        """Make this process what a new one with the command is at its start."""
        os.chdir(command.folder)
        os.environ.clear()
        os.environ.update(self._environment | command.environment)
        sys.path[:] = [*_python_path(), *self._path]
        for variable, (module, name, default) in READ_AT_IMPORT.items():
            value = type(default)(os.environ.get(variable, default))
            setattr(sys.modules[module], name, value)
        self._use_threads()
        sys.orig_argv = [sys.executable, *command.arguments]
        setproctitle.setproctitle(" ".join(sys.orig_argv))

    def _use_threads(self) -> None:
        """Use as many threads as the environment says; OpenMP has read it already."""
        import torch

        most = min(self._threads, len(os.sched_getaffinity(0)))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", most)))


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def wait(connection: socket.socket, image: Image) -> Command | None:
    """Serve the connection. Returns in each new process; and in this one, None, at the end."""
    while True:
        received = _receive(connection)
        if received is None:
            return None
        command, descriptors = received
        image.tokenizers.load_for(command.arguments)
        answer = _fork_twice()
        if answer is not None:
            for number in descriptors:
                os.close(number)
            connection.sendall(SIZE.pack(answer))
            continue
        connection.close()
        if os.getppid() != command.parent:
            os._exit(1)  # the caller has ended
        if command.own_group:
            os.setpgid(0, 0)
        os.sched_setaffinity(0, command.cpus)
        resource.setrlimit(resource.RLIMIT_NOFILE, command.files)
        if command.prepare is not None:
            name, given = command.prepare
            pkgutil.resolve_name(name)(*given)
        ours, theirs = (_moved(end) for end in socket.socketpair())
        if not os.fork():
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            setproctitle.setproctitle("preloaded")
            ours.close()
            for number in descriptors:
                os.close(number)
            connection = theirs
            continue
        _place(descriptors, command.descriptors)
        theirs.close()
        use(Interpreter(ours))
        image.become(command)
        return command


def _receive(connection: socket.socket) -> tuple[Command, list[int]] | None:
    """The next command and its file descriptors, None if the caller has ended."""
    head, descriptors, _, _ = socket.recv_fds(connection, SIZE.size, 64)
    if not head:
        return None
    (size,) = SIZE.unpack(head)
    data = connection.recv(size, socket.MSG_WAITALL)
    return msgspec.msgpack.decode(data, type=Command), descriptors


def _fork_twice() -> int | None:
    """Fork an orphan. Returns its id, or a negative error number; and None in the orphan."""
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)
    if child == 0:
        between = os.getpid()
        orphan = os.fork()
        if orphan:
            os.write(writing, SIZE.pack(orphan))
            os._exit(0)
        os.close(reading)
        os.close(writing)
        while os.getppid() == between:
            time.sleep(0.0005)
        return None
    os.close(writing)
    os.waitpid(child, 0)
    answer = os.read(reading, SIZE.size)
    os.close(reading)
    return int(SIZE.unpack(answer)[0]) if answer else -errno.EAGAIN


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the file descriptors their numbers."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for source, number in zip(high, numbers, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)


def _moved(end: socket.socket) -> socket.socket:
    """The same socket, with a number that a command's file descriptors leave free."""
    number = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, HIGH)
    end.close()
    return socket.socket(fileno=number)


def spawn(real: Callable[..., int], path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`: start a process of `multiprocessing`."""
    texts = [os.fsdecode(argument) for argument in args]
    if "--multiprocessing-fork" not in texts:
        return real(path, args, passfds)
    numbers = {0, 1, 2, *passfds}
    return preloaded().start(texts[1:], {number: number for number in sorted(numbers)})


def run(arguments: Sequence[str]) -> None:
    """Do what Python does with these arguments, which have `-m` or `-c`."""
    option = next(index for index, text in enumerate(arguments) if text in ("-m", "-c"))
    what, more = arguments[option + 1], arguments[option + 2 :]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[option] == "-m":
        sys.argv = ["-m", *more]
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    else:
        sys.argv = ["-c", *more]
        exec(compile(what, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    own = socket.socket(fileno=int(sys.argv[1]))
    connection = _moved(own)
    image = Image()
    connection.sendall(b"!")
    command = wait(connection, image)
    if command is not None:
        real = multiprocessing.util.spawnv_passfds
        multiprocessing.util.spawnv_passfds = lambda *given: spawn(real, *given)
        subprocess.Popen = Popen  # type: ignore[misc]
        run(command.arguments)
