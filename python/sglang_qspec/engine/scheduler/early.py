"""Lets the worker decide a pass before SGLang waits for the lengths of the last pass."""

from __future__ import annotations

from typing import Any

from sglang_qspec.engine.passes.launch.future_map import KnownLengths
from sglang_qspec.engine.passes.worker import QSpecWorker


def decide(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.run_batch`: tell SGLang the lengths if the worker launches early."""
    future_map = scheduler.future_map
    if isinstance(future_map, KnownLengths) and isinstance(scheduler.model_worker, QSpecWorker):
        future_map.known = None  # for a worker that fails
        future_map.known = scheduler.model_worker.launches_early(batch)
