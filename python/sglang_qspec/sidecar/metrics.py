"""Serves the sidecar's figures for Prometheus at /metrics, and its health at /health.

The threads of this server read only the latest `Snapshot`. The loop of the sidecar publishes a new
one about once a second, and never waits for them.
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
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_qspec.errors import ConfigError
from sglang_qspec.link import Faults, LinkServer
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.drafter import Drafter

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


@dataclass(frozen=True)
class Snapshot:
    """Figures of the sidecar at one time; totals count since its start."""

    servers: int
    requests: int
    texts: int
    rows: int
    backlog_s: float
    overload: int
    kv_rows: int
    kv_tokens: int
    kv_tokens_total: int
    drafted_tokens: int
    step_passes: int
    step_tokens: int
    step_seconds: float
    declined: int
    left_out: int
    dropped_messages: int
    malformed_messages: int


def snapshot(drafter: Drafter, model: DraftKV, server: LinkServer) -> Snapshot:
    """The present figures; only the thread of the loop calls this."""
    return Snapshot(
        servers=len(server.peers),
        requests=drafter.requests,
        texts=drafter.texts,
        rows=drafter.rows,
        backlog_s=drafter.backlog_s,
        overload=drafter.overload,
        kv_rows=model.rows.open_rows,
        kv_tokens=model.rows.total_slots - model.rows.free_slots,
        kv_tokens_total=model.rows.total_slots,
        drafted_tokens=drafter.drafted_tokens,
        step_passes=drafter.step_times.passes,
        step_tokens=drafter.step_times.tokens,
        step_seconds=drafter.step_times.seconds,
        declined=drafter.declined,
        left_out=drafter.left_out,
        dropped_messages=server.dropped,
        malformed_messages=server.malformed,
    )


GAUGES = {
    "servers": ("servers", "Connected servers"),
    "requests": ("requests", "Requests with unfinished drafts"),
    "texts": ("texts", "Distinct prompts that the sidecar keeps"),
    "rows": ("rows", "Completions that the latest pass advanced"),
    "backlog_seconds": ("backlog_s", "Seconds until step drafts and first completions are done"),
    "overload": ("overload", "Level of overload, 0 to 5"),
    "kv_rows": ("kv_rows", "Open rows of the draft model's KV"),
    "kv_tokens": ("kv_tokens", "KV slots in use"),
    "kv_tokens_available": ("kv_tokens_total", "KV slots, free or in use"),
}
"""Name after the prefix: field of `Snapshot`, and description."""
COUNTERS = {
    "drafted_tokens": ("drafted_tokens", "Drafted tokens"),
    "step_passes": ("step_passes", "Passes that advanced step drafts"),
    "step_tokens": ("step_tokens", "Step draft tokens"),
    "step_seconds": ("step_seconds", "Seconds of the passes that advanced step drafts"),
    "declined_requests": ("declined", "Declined submissions"),
    "left_out_completions": ("left_out", "Completions that overload ended early"),
    "dropped_messages": ("dropped_messages", "Messages that a server's queue did not take"),
    "malformed_messages": ("malformed_messages", "Messages that the protocol does not allow"),
}
"""As `GAUGES`; Prometheus appends `_total` to the name."""


class SidecarMetrics(Collector):
    """Owns the latest snapshot, and the threads that answer /metrics and /health."""

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen on `host` and `port`; /health answers 503 until the first snapshot.

        Raises ConfigError if the address cannot be used.
        """
        self._clock = clock
        self._snapshot: Snapshot | None = None
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

    def publish(self, drafter: Drafter, model: DraftKV, server: LinkServer) -> None:
        """Publish a snapshot, unless the latest one is younger than PUBLISH_S."""
        now = self._clock()
        if now - self._published_at >= PUBLISH_S:
            self._snapshot, self._published_at = snapshot(drafter, model, server), now

    @property
    def is_healthy(self) -> bool:
        """Whether the loop has published a snapshot in the last STALE_S seconds."""
        return self._snapshot is not None and self._clock() - self._published_at < STALE_S

    def collect(self) -> Iterator[Metric]:
        """The series of the latest snapshot; none before the first."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        for name, (field, description) in GAUGES.items():
            value = getattr(snapshot, field)
            yield GaugeMetricFamily(PREFIX + name, description, value=value)
        for name, (field, description) in COUNTERS.items():
            value = getattr(snapshot, field)
            yield CounterMetricFamily(PREFIX + name, description, value=value)

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
