"""Settles a pass before SGLang processes its result, unless the next pass has settled it.

With the overlap scheduler, the last pass before an idle scheduler or a prefill has no next decode
call. Its labels and its counts must be complete before SGLang sends its tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_qspec.engine import speculator


def settle(scheduler: Any, batch: Any, result: Any) -> None:
    """Before `Scheduler.process_batch_result`: settle the passes up to the one of `result`."""
    if speculator.latest() is not None:
        scheduler.model_worker.settle(result)
