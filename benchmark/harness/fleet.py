"""Keeps the servers of a benchmark: one server runs, and the others wait stopped in memory.

An idle SGLang scheduler polls all the time. So the fleet stops (SIGSTOP) all processes of a waiting
server, the sidecar too. A waiting server takes no processor time from the running server.
"""

from __future__ import annotations

from typing import Self

import psutil

from benchmark.harness.configuration import Configuration
from benchmark.harness.output import say
from benchmark.harness.server import Server, ServerError, StartTimeoutError
from benchmark.harness.speculation import wait_for_sidecar

SPARE_BYTES = 2**30
"""Memory that the servers must leave available."""


class Fleet:
    """Servers by configuration, as a context manager that ends them all.

    A new server starts beside the waiting ones if the available memory holds it and SPARE_BYTES
    more. Otherwise the fleet first ends waiting servers, the longest unused one first. It estimates
    the memory of a new server from the memory of the servers before it. With `keeps` False no
    server waits, because one server fills a GPU.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._servers: dict[object, tuple[Configuration, Server]] = {}
        """By Configuration.server_key, the longest unused first."""
        self._running: object = None
        """Key of the server that is not paused; None after its end."""
        self._held: dict[bool, int] = {}
        """Largest private memory, in bytes, of a server without and with a sidecar."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._servers):
            self._end(key)

    def run(self, configuration: Configuration) -> Server:
        """The server of the configuration, ready for requests; all other servers are paused.

        Raises ServerError if it does not start, and RuntimeError if its sidecar is not ready.
        """
        key = configuration.server_key
        if self._running is not None and self._running != key:
            self._pause(self._running)
        if key in self._servers:
            _, server = self._servers.pop(key)
            if self._running is None:
                server.resume()
        else:
            server = self._start(configuration)
        self._servers[key] = configuration, server
        self._running = key
        if configuration.has_sidecar:
            wait_for_sidecar(server)
        return server

    def drop(self, configuration: Configuration) -> None:
        """End the server of the configuration, if there is one; the next `run` starts another."""
        if configuration.server_key in self._servers:
            self._end(configuration.server_key)

    def _pause(self, key: object) -> None:
        configuration, server = self._servers[key]
        self._measure(configuration, server)
        server.pause()
        self._running = None

    def _start(self, configuration: Configuration) -> Server:
        needed = self._needed(configuration)
        while self._servers and not self._fits(needed):
            self._end(next(iter(self._servers)))
        beside = len(self._servers)
        try:
            return self._started(configuration)
        except ServerError as error:
            # A server without enough memory ends; more memory does not help a slow one.
            if not beside or isinstance(error, StartTimeoutError):
                raise
            say(f"{configuration.name} did not start beside {beside} servers: {error}")
        for key in list(self._servers):
            self._end(key)
        return self._started(configuration)

    def _started(self, configuration: Configuration) -> Server:
        say(f"starting a server for {configuration.name}")
        return configuration.server().__enter__()

    def _fits(self, needed: int) -> bool:
        return self._keeps and psutil.virtual_memory().available >= needed + SPARE_BYTES

    def _needed(self, configuration: Configuration) -> int:
        """Bytes; for the first server with a sidecar, twice those of a server without one."""
        if configuration.has_sidecar in self._held:
            return self._held[configuration.has_sidecar]
        return 2 * max(self._held.values(), default=0)

    def _measure(self, configuration: Configuration, server: Server) -> None:
        """Record the memory of a server after it has served: unused KV slots take no memory."""
        kind = configuration.has_sidecar
        self._held[kind] = max(self._held.get(kind, 0), server.private_bytes)

    def _end(self, key: object) -> None:
        _, server = self._servers.pop(key)
        if self._running == key:
            self._running = None
        server.stop()
