"""Prepares each pass for SGLang, which is about to process its result.

With the overlap scheduler, no decode call follows a pass if a prefill is next or the scheduler is
idle. The labels and counts of the pass must be complete before SGLang sends its tokens.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.scheduler import endings, kv_ahead


def settle(scheduler: Any, batch: Any, result: Any) -> None:
    """Before `Scheduler.process_batch_result`: settle the passes up to the one of `result`."""
    worker = scheduler.model_worker
    if not isinstance(worker, QSpecWorker):
        return
    plain = batch.forward_mode.is_decode() and result.speculative_num_draft_tokens == 1
    if not scheduler.enable_overlap:
        kv_ahead.note_pass(one_slot=plain)
    endings.watch(batch.reqs, plain=plain, early=worker.is_early(result))
    # With the overlap scheduler `batch` is a copy for this call.
    if plain and scheduler.enable_overlap and not batch.has_grammar and not batch.return_logprob:
        _count(scheduler, batch)
    worker.settle(result)


def _count(scheduler: Any, batch: Any) -> None:
    """Count the tokens of a plain pass, and let SGLang add them as without speculation.

    SGLang's loop over the tokens that a verify pass accepted takes longer, and gives the same.
    """
    for req in batch.reqs:
        if req.finished_reason is None and not req.is_retracted:
            req.kv.kv_committed_len += 1
            req.spec_verify_ct += 1
            if histogram := req.spec_correct_drafts_histogram:
                histogram[0] += 1
            else:
                histogram.append(1)
    count = len(batch.reqs)
    scheduler.metrics_reporter.update_spec_metrics(count, 0, num_accept_tokens=count)
    batch.spec_algorithm = SpeculativeAlgorithm.NONE
