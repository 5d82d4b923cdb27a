"""Adds the tokens of a prefill that verified drafts to the output.

SGLang's processing of a prefill adds one token to the output. What replaces the next
`Req.update_finish_state` adds the other accepted tokens with `commit` (`engine.scheduler.endings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_qspec.engine.passes.outcome import ComingOutcome
from sglang_qspec.engine.passes.request_record import VerifiedPrefill, record_of


def keep(reqs: Sequence[Any], outcome: ComingOutcome) -> None:
    """Keep the outcome of a prefill until SGLang processes it."""
    for row, req in enumerate(reqs):
        record_of(req).prefill = VerifiedPrefill(outcome, row, len(req.output_ids))


def forget(reqs: Sequence[Any]) -> None:
    """Drop the earlier prefills of `reqs`; a retracted request has one."""
    for req in reqs:
        record_of(req).prefill = None


def commit(req: Any) -> int:
    """Add the accepted tokens after the first one, which SGLang has just added to the output.

    Returns the number of added tokens that have not been searched for a stop. It includes tokens
    that `recover` has added.
    """
    record = record_of(req)
    prefill, record.prefill = record.prefill, None
    unsearched, record.unsearched = record.unsearched, 0
    if prefill is None:
        return unsearched
    more = prefill.outcome.read().tokens[prefill.row][1:]
    req.output_ids.extend(more)
    req.kv.kv_committed_len += len(more)
    return unsearched + len(more)


def recover(reqs: Sequence[Any]) -> None:
    """After an error, add the tokens of prefills that SGLang has processed without `commit`.

    These tokens are searched for a stop when the next tokens join the output.
    """
    for req in reqs:
        record = record_of(req)
        if record.prefill is not None and len(req.output_ids) > record.prefill.output_len:
            record.unsearched = commit(req)
