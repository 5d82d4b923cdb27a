"""The servers of a benchmark: one of them runs, and the others wait stopped in memory.

An idle SGLang scheduler polls without rest. A server that waits is therefore stopped (SIGSTOP) with
all its processes, the sidecar too, and takes no processor time from the server that runs.
"""

from __future__ import annotations

from typing import Self

import psutil

from benchmark.harness.configuration import Configuration
from benchmark.harness.output import say
from benchmark.harness.server import Server, ServerError, StartTimeoutError
from benchmark.harness.speculation import wait_for_sidecar


class Fleet:
    """Servers by configuration, as a context manager that ends them all.

    A server is started beside those that wait if the memory that is available holds it and leaves
    `spare_bytes`. Otherwise servers that wait are ended first, the longest unused one first. What a
    server needs is what servers of this run were measured to hold. `spare_bytes` of None keeps no
    other server, for a GPU that one server fills.
    """

    def __init__(self, spare_bytes: float | None) -> None:
        self._spare_bytes = spare_bytes
        self._servers: dict[object, tuple[Configuration, Server]] = {}
        """By Configuration.server_key, the longest unused first; all but the last are paused."""
        self._held: dict[bool, int] = {}
        """Most private memory, in bytes, of a server without and with a sidecar."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._servers):
            self._end(key)

    def run(self, configuration: Configuration) -> Server:
        """The configuration's server, running alone and ready for requests.

        Raises ServerError if it does not start, and RuntimeError if its sidecar is not ready.
        """
        key = configuration.server_key
        current = next(reversed(self._servers), None)
        if current is not None and current != key:
            before, waiting = self._servers[current]
            self._measure(before, waiting)
            waiting.pause()
        if key in self._servers:
            _, server = self._servers.pop(key)
            if current != key:
                server.resume()
        else:
            server = self._start(configuration)
        self._servers[key] = configuration, server
        if configuration.has_sidecar:
            wait_for_sidecar(server)
        return server

    def drop(self, configuration: Configuration) -> None:
        """End the configuration's server, if there is one; the next `run` starts another."""
        if configuration.server_key in self._servers:
            self._end(configuration.server_key)

    def _start(self, configuration: Configuration) -> Server:
        needed = self._needed(configuration)
        while self._servers and not self._fits(needed):
            self._end(next(iter(self._servers)))
        beside = len(self._servers)
        try:
            return self._started(configuration)
        except ServerError as error:
            # A server that lacks memory ends; one that is only slow is not helped by more.
            if not beside or isinstance(error, StartTimeoutError):
                raise
            say(f"{configuration.name} did not start beside {beside} servers: {error}")
        for key in list(self._servers):
            self._end(key)
        return self._started(configuration)

    def _started(self, configuration: Configuration) -> Server:
        say(f"starting a server for {configuration.name}")
        server = configuration.server()
        try:
            server.start()
        except BaseException:
            server.stop()
            raise
        return server

    def _fits(self, needed: int) -> bool:
        if self._spare_bytes is None:
            return False
        return psutil.virtual_memory().available >= needed + self._spare_bytes

    def _needed(self, configuration: Configuration) -> int:
        """Bytes; of a first server with a sidecar, at most twice those of one without."""
        if configuration.has_sidecar in self._held:
            return self._held[configuration.has_sidecar]
        return 2 * max(self._held.values(), default=0)

    def _measure(self, configuration: Configuration, server: Server) -> None:
        """Note what the server holds after it has served: unused KV slots take no memory."""
        kind = configuration.has_sidecar
        self._held[kind] = max(self._held.get(kind, 0), server.private_bytes)

    def _end(self, key: object) -> None:
        _, server = self._servers.pop(key)
        server.stop()
