"""Stopwatches on functions, for the parts of a drafter's pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def always(*_: Any) -> bool:
    """Time all calls."""
    return True


class Stopwatch:
    """Adds up the calls of the functions that it times, and their seconds."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0

    def reset(self) -> None:
        self.calls, self.seconds = 0, 0.0

    @contextmanager
    def on(self, owner: Any, *names: str, when: Callable[..., bool] = always) -> Iterator[None]:
        """Time the functions `names` of `owner` inside the context.

        Only calls count for whose arguments `when` is true.
        """
        kept = {name: getattr(owner, name) for name in names}
        for name, function in kept.items():
            setattr(owner, name, self._timed(function, when))
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if not when(*arguments):
                return function(*arguments)
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - began
            self.calls += 1
            return result

        return run
