"""Samples the memory in use on the machine's GPUs, and keeps the peak while a part runs."""

from __future__ import annotations

import threading
from typing import Self

from benchmark.harness.machine import of_gpus

PERIOD_SECONDS = 0.5


def used_mib() -> int | None:
    """Memory in use on all GPUs together, in MiB; None if it is not known."""
    try:
        used = list(map(int, of_gpus("memory.used")))
    except ValueError:
        return None
    return sum(used) if used else None


class Peak:
    """The largest `used_mib` while the context lasts, sampled every PERIOD_SECONDS."""

    def __init__(self) -> None:
        self.mib = used_mib()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self.mib is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            self.mib = max(self.mib or 0, used_mib() or 0)
