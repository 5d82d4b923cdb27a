"""Measures the processor time that other processes take during a measurement."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from benchmark.harness.server import Server


class Others:
    """Processor time of all processes except a server, its sidecar and this process.

    The time counts from the creation of the object.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._began, self._busy, self._own = time.monotonic(), _busy(), _own(server)

    def share(self) -> float:
        """Share of all processors, from 0 to 1."""
        seconds = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        used = (_busy() - self._busy) - (_own(self._server) - self._own)
        return min(max(0.0, used / seconds), 1.0)


def _busy() -> float:
    """Busy seconds of all processors since the start of the machine."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own(server: Server) -> float:
    """Processor seconds of the server, its sidecar and this process."""
    total = 0.0
    for process in (psutil.Process(), *server.processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
