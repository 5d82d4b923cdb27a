"""Keeps many silent connections open to one endpoint."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from test.link.sockets import closed, plain_socket


class Flood:
    """Keeps `count` silent connections open, and replaces those that the sidecar closes.

    It opens `per_second` connections per second; with `at_once` it opens the first `count` without
    pauses.
    """

    def __init__(
        self, endpoint: str, count: int, *, per_second: int, at_once: bool = False
    ) -> None:
        self.opened = 0
        """Number of connections opened since the beginning."""
        self._endpoint = endpoint
        self._count = count
        self._pause_s = 1 / per_second
        self._at_once = at_once
        self._sockets: list[socket.socket] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Flood:
        while self._at_once and self.opened < self._count:
            self._open()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()
        for silent in self._sockets:
            silent.close()

    def _open(self) -> None:
        silent = plain_socket(self._endpoint)
        self._sockets.append(silent)
        self.opened += 1

    def _run(self) -> None:
        while not self._ending.wait(self._pause_s):
            for silent in [silent for silent in self._sockets if closed(silent)]:
                silent.close()
                self._sockets.remove(silent)
            if len(self._sockets) < self._count:
                # The listener's queue may be full.
                with contextlib.suppress(OSError):
                    self._open()
