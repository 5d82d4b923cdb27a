"""Publishes `Speculator.describe` as Prometheus series, in a server with `--enable-metrics`.

SGLang collects the series of all its processes through files, so series made in the scheduler's
process appear in `/metrics`.
"""

from __future__ import annotations

from typing import Any

from sglang_qspec.engine import speculation
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.engine.telemetry.metrics import DraftMetrics


def start(streamer: type, scheduler: Any) -> None:
    """After `Scheduler.get_output_streamer_class`, when the scheduler has its metrics collector.

    Creates the series with the labels of the collector, if there is one.
    """
    active, collector = speculation.active(), scheduler.metrics_collector
    if active is not None and collector is not None and active.series is None:
        active.series = DraftMetrics(collector.labels)
        active.first_drafts.observer = active.series.first_draft.observe


def publish(result: None, manager: Any) -> None:
    """After `ExternalCorpusManager.check_pending_load`, which each scheduler iteration calls.

    Publishes at most once a second, and goes on after a failure of speculation, so that the series
    do not stay at their last values.
    """
    shown = speculation.latest()
    if shown is not None and shown.series is not None:
        shown.series.publish_due(lambda: {**shown.describe(), "speculation": _state(shown)})


def _state(shown: Speculator) -> str:
    """The state of speculation, one of `metrics.STATES`."""
    if speculation.failed():
        return "failed"
    return "on" if shown.runtime_settings.enabled else "off"
