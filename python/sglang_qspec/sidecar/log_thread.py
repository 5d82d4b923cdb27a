"""Writes the log of a sidecar that runs at a low priority.

Server and sidecar often write to one file, and the kernel lets one process write at a time. A
writer of the idle class that loses its CPU in the middle would hold up the server's writes, and
with them its scheduler: for 23 s on a CPU with five busy processes. So a thread of normal priority
writes.
"""

from __future__ import annotations

import logging
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any


class LogThread(QueueHandler):
    """Hands records to a new thread, which has the priority of the thread that creates it."""

    def __init__(self, *handlers: logging.Handler) -> None:
        queue: SimpleQueue[Any] = SimpleQueue()
        super().__init__(queue)
        self._listener: QueueListener | None = QueueListener(queue, *handlers)
        self._listener.start()

    def close(self) -> None:
        """Write all records, and end the thread. `logging.shutdown` calls this."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
        super().close()


def begin() -> None:
    """Let a new thread write all records from now on."""
    root = logging.getLogger()
    root.handlers = [LogThread(*root.handlers)]
