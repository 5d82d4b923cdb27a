"""Publishes `Speculator.describe` as Prometheus series, in a server with `--enable-metrics`.

SGLang collects the series of all its processes through files, so series made in the scheduler's
process appear in `/metrics`.
"""

from __future__ import annotations

from typing import Any

from sglang_qspec.engine import speculation
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.engine.telemetry.metrics import DraftMetrics

_published: tuple[DraftMetrics, Speculator] | None = None
"""The series of this process, and the speculator that they show."""


def start(streamer: type, scheduler: Any) -> None:
    """After `Scheduler.get_output_streamer_class`, when the scheduler has its metrics collector.

    Creates the series with the labels of the collector, if there is one.
    """
    global _published
    active, collector = speculation.active(), scheduler.metrics_collector
    if active is not None and collector is not None and _published is None:
        series = DraftMetrics(collector.labels)
        active.first_drafts.observer = series.first_draft.observe
        _published = series, active


def publish(result: None, manager: Any) -> None:
    """After `ExternalCorpusManager.check_pending_load`, which each scheduler iteration calls.

    Publishes at most once a second, and goes on after a failure of speculation, so that the series
    do not stay at their last values.
    """
    if _published is not None:
        series, shown = _published
        series.publish_due(lambda: {**shown.describe(), "speculation": _state(shown)})


def _state(shown: Speculator) -> str:
    """The state of speculation, one of `metrics.STATES`."""
    if speculation.active() is not shown:
        return "failed"
    return "on" if shown.runtime_settings.enabled else "off"
