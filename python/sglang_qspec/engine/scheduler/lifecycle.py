"""Reports the scheduler's events to the `Speculator` of its process.

A request starts when SGLang queues it (`enqueued`). It ends when SGLang sends its last output
(`finished`, which `last_output` calls) or aborts it in the waiting queue (`aborted`).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded, reading
from sglang_qspec.engine.frontend import provenance
from sglang_qspec.engine.passes import tracing
from sglang_qspec.engine.passes.sample.seeds import seeded_of
from sglang_qspec.engine.requests.live_request import Tally
from sglang_qspec.engine.requests.scopes import scope_of
from sglang_qspec.engine.scheduler import stop_strings


def started(result: None, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.init_model_worker`: start a sidecar on the target's GPU."""
    active = speculation.active()
    if active is not None:
        active.sidecar.start_waiting()


def enqueued(result: None, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """After `Scheduler._add_request_to_queue`, which may also have aborted the request."""
    active = speculation.active()
    if active is None or req.to_finish is not None or is_health_check_generate_req(req):
        return
    if not scheduler.waiting_queue or scheduler.waiting_queue[-1] is not req:
        return
    if not is_retracted:
        with reading("noting its priority"):
            active.precedence.arrive(rank(scheduler, req)[0])
        with reading("widening the search for its stop strings"):
            stop_strings.widen(req.sampling_params)
    with reading("starting its labels and its trace"):
        provenance.begin(req, active.settings.return_provenance)
        tracing.begin(req)
    if req.custom_logit_processor:  # it may read the output, which excludes draft tokens
        return
    if req.multimodal_inputs is not None or req.input_embeds is not None:
        return  # the draft model cannot read images or embeddings
    fields: dict[str, Any] | None = None
    with reading("starting its drafts"):
        fields = _fields_of(req, scheduler, active.settings)
    if fields is not None:
        with guarded("enqueuing a request"):
            active.enqueue(req.rid, **fields)


def _fields_of(req: Any, scheduler: Any, settings: QSpecConfig) -> dict[str, Any]:
    """The arguments of `Speculator.enqueue` that a request determines, with their types."""
    params = req.sampling_params
    return {
        "prompt_ids": list(req.origin_input_ids_unpadded),
        "output_ids": list(req.output_ids),
        "max_new_tokens": int(params.max_new_tokens),
        "stop_token_ids": sorted(params.stop_token_ids or ()),
        "ignore_eos": bool(params.ignore_eos),
        "custom_params": params.custom_params,
        "rank": rank(scheduler, req),
        "seeded": seeded_of(req, reject=settings.acceptance == "reject"),
        "scope": scope_of(req),
    }


def rank(scheduler: Any, req: Any) -> tuple[int, int]:
    """Sort key of SGLang's queue before arrival time: priority, then length under `lof`.

    SGLang serves smaller ranks sooner. A policy that uses the prefix cache sorts the queue again at
    each admission. For this kind of policy the rank assumes the order of arrival.
    """
    priority = 0
    if scheduler.enable_priority_scheduling:
        priority = req.priority * scheduler.policy.priority_sign
    longest_first = scheduler.policy.policy is CacheAgnosticPolicy.LOF
    # A request without a priority gets the lowest possible one, which may overflow 64 bits.
    return (
        max(-_RANK_LIMIT, min(priority, _RANK_LIMIT)),
        -req.sampling_params.max_new_tokens if longest_first else 0,
    )


_RANK_LIMIT = 1 << 62


def finished(req: Any) -> Tally | None:
    """End a finished request and return its tally; None if it had no drafts."""
    active = speculation.active()
    return None if active is None else active.end(req.rid, len(req.output_ids_through_stop))


def aborted(result: None, scheduler: Any, abort_req: Any, req: Any) -> None:
    """After `Scheduler.send_abort_output`: end the request, which was still queued."""
    active = speculation.active()
    if active is not None:
        with guarded("aborting a request"):
            active.end(req.rid)


def polled(result: None, manager: Any) -> None:
    """After `ExternalCorpusManager.check_pending_load`, which each scheduler iteration calls."""
    active = speculation.active()
    if active is not None:
        with guarded("receiving drafts"):
            active.poll()
