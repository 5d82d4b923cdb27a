"""Runs functions in processes that fork from one that has imported SGLang's model executor.

The imports take several seconds of a core, and a process can load only one model with SGLang.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["test.imports"])
_SECONDS = 240

Result = TypeVar("Result")


def run(function: Callable[..., Result], *arguments: object) -> Result:
    """Return what `function` returns in a process of its own; exceptions of it are raised here."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(function, *arguments).result(_SECONDS)
