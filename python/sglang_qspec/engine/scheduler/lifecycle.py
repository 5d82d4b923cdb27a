"""Reports the scheduler's events to the `Speculator` of its process.

A request begins when it is `enqueued`. It ends when it has `finished`, which is seen where its last
output is sent (`last_output`), or when it is `aborted` in the waiting queue.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_qspec.engine.failsafe import guarded
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes.sampling_seeds import seeded_of
from sglang_qspec.engine.requests import speculator
from sglang_qspec.engine.requests.live_request import Tally


def enqueued(result: None, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """After `Scheduler._add_request_to_queue`, which may also have aborted the request."""
    active = speculator.active()
    if active is None or req.to_finish is not None or is_health_check_generate_req(req):
        return
    if not scheduler.waiting_queue or scheduler.waiting_queue[-1] is not req:
        return
    with guarded("a list of provenance was begun"):
        provenance.begin(req, active.settings.return_provenance)
    if req.custom_logit_processor:  # which may look at the output, and knows nothing of a tree
        return
    if req.multimodal_inputs is not None or req.input_embeds is not None:
        return  # its token ids stand for what the draft model cannot see
    params = req.sampling_params
    with guarded("a request was queued"):
        active.enqueue(
            req.rid,
            prompt_ids=list(req.origin_input_ids_unpadded),
            output_ids=list(req.output_ids),
            max_new_tokens=params.max_new_tokens,
            stop_token_ids=sorted(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
            custom_params=params.custom_params,
            rank=rank(scheduler, req),
            seeded=seeded_of(req),
        )


def rank(scheduler: Any, req: Any) -> tuple[int, int]:
    """By what SGLang sorts its queue before the time of arrival: priority, and length for `lof`.

    Policies that look at the prefix cache sort anew at each admission; their requests count as
    served in the order of their arrival.
    """
    priority = 0
    if scheduler.enable_priority_scheduling:
        priority = req.priority * scheduler.policy.priority_sign
    longest_first = scheduler.policy.policy is CacheAgnosticPolicy.LOF
    # A request without a priority has the lowest that there is, which no wire format carries.
    return (
        max(-_RANK_LIMIT, min(priority, _RANK_LIMIT)),
        -req.sampling_params.max_new_tokens if longest_first else 0,
    )


_RANK_LIMIT = 1 << 62


def finished(req: Any) -> Tally | None:
    """The request has finished, for any reason. Returns its tally; None if it had no drafts."""
    active = speculator.active()
    return None if active is None else active.end(req.rid, len(req.output_ids_through_stop))


def aborted(result: None, scheduler: Any, abort_req: Any, req: Any) -> None:
    """After `Scheduler.send_abort_output`: the request ended in the queue."""
    active = speculator.active()
    if active is not None:
        with guarded("a request was aborted"):
            active.end(req.rid)


def polled(result: None, manager: Any) -> None:
    """After `ExternalCorpusManager.check_pending_load`, which each scheduler iteration calls."""
    active = speculator.active()
    if active is not None:
        with guarded("drafts were received"):
            active.poll()
