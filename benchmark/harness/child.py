"""Runs a model in a process of its own, and pins processes to processors."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from sglang_qspec.values import parse_cores

_answers: list[Callable[[Any], Any]] = []
"""In a child process: the one function that answers its questions."""


def pin(cores: str) -> None:
    """Pin this process and its later children. Call it before the import of torch.

    Torch reads the number of threads once.
    """
    chosen = parse_cores(cores)
    os.sched_setaffinity(0, chosen)
    os.environ["OMP_NUM_THREADS"] = str(len(chosen))


def draft_model(path: str, **options: Any) -> Any:
    """A DraftModel of this process; `options` are fields of DraftModelOptions besides the path."""
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    return DraftModel(DraftModelOptions(path, **options))


class Child(ProcessPoolExecutor):
    """A process that calls `make` once, and calls the function from `make` at each `ask`."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        super().__init__(1, spawn, _start, (make, *arguments))

    def ask(self, question: Any = None) -> Any:
        """The child's answer; the first call waits until the child is ready."""
        return self.submit(_answer, question).result()


def _start(make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
    logging.getLogger("sglang").setLevel(logging.ERROR)
    _answers.append(make(*arguments))


def _answer(question: Any) -> Any:
    return _answers[0](question)
