"""The servers of a run: one of them runs, the others wait stopped, where there is memory for them.

An idle SGLang scheduler polls without rest, so a server that waits is stopped (SIGSTOP) with all
its processes, its sidecar among them, and takes no time from the one that runs.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import psutil

from benchmark.harness.configuration import Configuration
from benchmark.harness.output import say
from benchmark.harness.server import Server
from benchmark.harness.speculation import wait_for_sidecar


class Fleet:
    """Servers by configuration, as a context manager that ends them all.

    Before a server is started others are ended, the longest unused first, until `free_bytes` of
    memory are available; None keeps no other server, for a GPU whose memory one server fills.
    """

    def __init__(self, free_bytes: float | None) -> None:
        self._free_bytes = free_bytes
        self._servers: dict[object, Server] = {}
        """By Configuration.server_key, the longest unused first; all but the last are paused."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for key in list(self._servers):
            self._end(key)

    def run(self, configuration: Configuration) -> Server:
        """The configuration's server, running alone and ready for requests.

        Raises ServerError if it does not start, and RuntimeError if its sidecar is not ready.
        """
        key = configuration.server_key
        current = next(reversed(self._servers), None)
        if current is not None and current != key:
            self._servers[current].pause()
        if key in self._servers:
            server = self._servers[key] = self._servers.pop(key)
            if current != key:
                server.resume()
        else:
            self._make_room()
            say(f"starting a server for {configuration.name}")
            server = self._servers[key] = configuration.server()
            server.start()
        if configuration.has_sidecar:
            wait_for_sidecar(server)
        return server

    def drop(self, configuration: Configuration) -> None:
        """End the configuration's server, if there is one; the next `run` starts another."""
        if configuration.server_key in self._servers:
            self._end(configuration.server_key)

    def _make_room(self) -> None:
        while self._servers and (
            self._free_bytes is None or psutil.virtual_memory().available < self._free_bytes
        ):
            self._end(next(iter(self._servers)))

    def _end(self, key: object) -> None:
        self._servers.pop(key).stop()
