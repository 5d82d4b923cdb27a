"""A model in a process of its own, which works when it is asked to, and pinned processors."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from sglang_qspec.config import parse_cores


def pin(cores: str) -> None:
    """Pin this process and its later children; before torch, which reads the threads once."""
    chosen = parse_cores(cores)
    os.sched_setaffinity(0, chosen)
    os.environ["OMP_NUM_THREADS"] = str(len(chosen))


class Child:
    """A process that calls `make` once, and the function that this returns for each `ask`."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()

    def ask(self, question: Any = None) -> Any:
        """The child's answer."""
        self._connection.send(question)
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(
    connection: Connection, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]
) -> None:
    logging.getLogger("sglang").setLevel(logging.ERROR)
    answer = make(*arguments)
    connection.send("loaded")
    while True:
        try:
            question = connection.recv()
        except EOFError:
            break
        connection.send(answer(question))
    # Tearing down torch and SGLang module by module would take seconds.
    os._exit(0)
