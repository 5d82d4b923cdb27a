"""Serves the sidecar's figures for Prometheus at /metrics, and its health at /health.

The threads of this server read only the latest snapshot of the figures. The loop of the sidecar
publishes a new one about once a second, and never waits for them.
"""

from __future__ import annotations

import logging
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_qspec.errors import ConfigError
from sglang_qspec.link import Faults
from sglang_qspec.sidecar.figures import FIGURES, Parts

PREFIX = "qspec_sidecar_"
PUBLISH_S = 1.0
"""Minimum interval, in seconds, between two snapshots."""
STALE_S = 60.0
"""Age of the latest snapshot, in seconds, above which the sidecar is not healthy. No pass takes
this long."""
IDLE_S = 10.0
"""Maximum wait for the next bytes of a request, in seconds."""
MAX_OPEN = 32
"""Maximum number of open requests. Each takes a thread and a file descriptor, and without a free
descriptor ZMQ aborts the sidecar or takes a whole core (`link/connections.py`)."""

logger = logging.getLogger(__name__)


class SidecarMetrics(Collector):
    """Owns the latest snapshot, and the threads that answer /metrics and /health."""

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen on `host` and `port`; /health answers 503 until the first snapshot.

        Raises ConfigError if the address cannot be used.
        """
        self._clock = clock
        self._snapshot: dict[str, float] | None = None
        """The latest value of each figure by name; None before the first."""
        self._published_at = -PUBLISH_S
        self._registry = CollectorRegistry()
        self._registry.register(self)
        try:
            self._server = _Server(host, port, self)
        except OSError as error:
            raise ConfigError(
                f"--metrics-host and --metrics-port are {host!r} and {port}, but this address "
                f"cannot be used: {error}"
            ) from None
        name = "sidecar-metrics"
        threading.Thread(target=self._server.serve_forever, name=name, daemon=True).start()
        logger.info("metrics are at http://%s:%d/metrics", host, self.port)

    @property
    def port(self) -> int:
        """The port that the threads listen on."""
        return self._server.server_port

    def publish(self, parts: Parts) -> None:
        """Publish a snapshot, unless the latest one is younger than PUBLISH_S."""
        now = self._clock()
        if now - self._published_at >= PUBLISH_S:
            self._snapshot = {figure.name: figure.read(parts) for figure in FIGURES}
            self._published_at = now

    @property
    def is_healthy(self) -> bool:
        """Whether the loop has published a snapshot in the last STALE_S seconds."""
        return self._snapshot is not None and self._clock() - self._published_at < STALE_S

    def collect(self) -> Iterator[Metric]:
        """The series of the latest snapshot; none before the first."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        for figure in FIGURES:
            family = CounterMetricFamily if figure.is_total else GaugeMetricFamily
            name = PREFIX + (figure.series or figure.name)
            yield family(name, figure.help, value=snapshot[figure.name])

    def text(self) -> bytes:
        """All series in Prometheus's text format."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Answers each request in a thread of its own; above MAX_OPEN requests it ends one at random.

    A client that never completes its requests therefore cannot keep Prometheus out.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, metrics: SidecarMetrics) -> None:
        self.metrics = metrics
        self._faults = Faults(logger, owner="metrics")
        self._open: set[socket.socket] = set()
        self._closed = threading.Condition()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._closed:
            if len(self._open) >= MAX_OPEN:
                with suppress(OSError):  # the client may have closed it
                    random.choice([*self._open]).shutdown(socket.SHUT_RDWR)
                self._closed.wait_for(lambda: len(self._open) < MAX_OPEN)
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._closed:
            self._open.discard(request)
            self._closed.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log the exception that is being handled, for a broken connection without a traceback."""
        error = sys.exception()
        self._faults.note("a request failed", repr(error), traceback=not isinstance(error, OSError))


class _Handler(BaseHTTPRequestHandler):
    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        metrics = self.server.metrics
        match urlsplit(self.path).path:
            case "/metrics":
                self._answer(200, metrics.text(), CONTENT_TYPE_LATEST)
            case "/health" if metrics.is_healthy:
                self._answer(200, b"ok\n")
            case "/health":
                self._answer(503, b"the sidecar loads its model, or its loop is stuck\n")
            case _:
                self._answer(404, b"/metrics and /health exist\n")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no requests; Prometheus sends one every few seconds."""
