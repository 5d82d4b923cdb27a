"""The figures of the service for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_qspec.tools.batch.server import Reply, ReplyKind
from sglang_qspec.tools.serve_batches.feed import Feed
from sglang_qspec.tools.serve_batches.objects import Batch

PREFIX = "qspec_batches_"


class Metrics(Collector):
    """Counts since the service started, and the state of its running batches."""

    def __init__(self, feed: Feed) -> None:
        self.connected = False
        """Whether a server answers."""
        self._feed = feed
        self._ended: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def settle(self, reply: Reply) -> None:
        """Count a line that has a record."""
        answered = reply.kind is ReplyKind.ANSWERED
        self._lines["answered" if answered else "failed"] += 1
        if answered:
            self._tokens["output"] += reply.tokens
            self._tokens["drafted"] += reply.accepted

    def end(self, batch: Batch) -> None:
        """Count a batch that has reached its final state."""
        self._ended[batch.status.value] += 1

    def collect(self) -> Iterator[Metric]:
        """All series."""
        counters = {
            "ended": ("status", self._ended, "Batches that have ended, by their state."),
            "lines": ("result", self._lines, "Lines that got a record."),
            "tokens": ("kind", self._tokens, "Output tokens of answers, and the drafted ones."),
        }
        for name, (label, counts, text) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=[label])
            for value, count in counts.items():
                counter.add_metric([value], count)
            yield counter
        running, left = Counter[str](), Counter[str]()
        for job in self._feed.jobs:
            running[job.tenant] += 1
            left[job.tenant] += job.left
        for name, text, by_tenant in (
            ("running", "Batches whose lines are asked, by tenant.", running),
            ("lines_left", "Lines of running batches without a record, by tenant.", left),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["tenant"])
            for tenant, count in by_tenant.items():
                gauge.add_metric([tenant], count)
            yield gauge
        rate, text = self._feed.speed.rate, "Output tokens per second while lines wait; 0: unknown."
        yield GaugeMetricFamily(PREFIX + "tokens_per_second", text, value=rate)
        text = "1 while a server answers, otherwise 0."
        yield GaugeMetricFamily(PREFIX + "connected", text, value=float(self.connected))

    def text(self) -> bytes:
        """All series in Prometheus's text format."""
        return generate_latest(self._registry)
