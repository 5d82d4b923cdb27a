"""Settles a pass before SGLang processes its result, unless a decode call has settled it.

With the overlap scheduler, no decode call follows a pass if a prefill is next or the scheduler is
idle. The labels and counts of the pass must be complete before SGLang sends its tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_qspec.engine.passes.worker import QSpecWorker


def settle(scheduler: Any, batch: Any, result: Any) -> None:
    """Before `Scheduler.process_batch_result`: settle the passes up to the one of `result`."""
    if isinstance(scheduler.model_worker, QSpecWorker):
        scheduler.model_worker.settle(result)
