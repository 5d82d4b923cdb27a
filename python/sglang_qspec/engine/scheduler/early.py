"""Lets the worker decide a pass before SGLang waits for the lengths of the last pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sglang_qspec.engine.passes.launch.future_map import LastTokens
from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.scheduler import kv_ahead

_CHANGED = (
    "input_ids",
    "out_cache_loc",
    "spec_info",
    "seq_lens",
    "seq_lens_cpu",
    "seq_lens_sum",
    "orig_seq_lens",
    "sampling_info",
)
"""The fields of a batch that the launch of a plain pass changes (`Launcher.plain`)."""


def decide(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.run_batch`: tell SGLang the lengths if the worker launches early."""
    future_map = scheduler.future_map
    if not scheduler.enable_overlap:
        return
    if isinstance(future_map, LastTokens) and isinstance(scheduler.model_worker, QSpecWorker):
        future_map.known = None  # for a worker that fails
        future_map.known = scheduler.model_worker.launches_early(batch)
        kv_ahead.note_pass(one_slot=future_map.known is not None)


def isolate(
    target: Callable[..., AbstractContextManager[None]],
    scheduler: Any,
    batch: Any,
    overlap: Any,
) -> AbstractContextManager[None]:
    """Around `Scheduler._forward_isolation`: keep only what an early pass changes."""
    worker = scheduler.model_worker
    if overlap and isinstance(worker, QSpecWorker) and worker.has_early_pass:
        return _isolated(scheduler, batch)
    return target(scheduler, batch, overlap=overlap)


@contextmanager
def _isolated(scheduler: Any, batch: Any) -> Iterator[None]:
    """SGLang's isolation of a pass, which keeps all fields of the batch, for a plain pass."""
    kept = [getattr(batch, name) for name in _CHANGED]
    batch.sampling_info = batch.sampling_info.copy_for_forward()
    scheduler.record_batch_in_overlap(batch)
    try:
        yield
    finally:
        for name, value in zip(_CHANGED, kept, strict=True):
            setattr(batch, name, value)
