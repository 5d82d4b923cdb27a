"""The scheduler's events, handed to the `Speculator` of its process.

A request's end is not here: it is seen where its output is sent (`report.OutputStreamer`), which
every finished request passes, however it ended; requests that end in the queue are `aborted`.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_qspec.engine import metrics, speculator


def enqueued(result: None, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """After `Scheduler._add_request_to_queue`, which may also have aborted the request."""
    active = speculator.active()
    if active is None or req.to_finish is not None or is_health_check_generate_req(req):
        return
    if not scheduler.waiting_queue or scheduler.waiting_queue[-1] is not req:
        return
    params = req.sampling_params
    active.enqueue(
        req.rid,
        prompt_ids=list(req.origin_input_ids_unpadded),
        output_ids=list(req.output_ids),
        max_new_tokens=params.max_new_tokens,
        stop_token_ids=sorted(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
        custom_params=params.custom_params,
    )


def aborted(result: None, scheduler: Any, abort_req: Any, req: Any) -> None:
    """After `Scheduler.send_abort_output`: the request ended in the queue."""
    active = speculator.active()
    if active is not None:
        active.end(req.rid)


def polled(result: None, manager: Any) -> None:
    """After `ExternalCorpusManager.check_pending_load`, which each scheduler iteration calls."""
    active = speculator.active()
    if active is not None:
        active.poll()
        metrics.publish_due(active)
