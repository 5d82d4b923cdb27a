"""Ends an output at the token where decoding token by token would end it.

SGLang searches all accepted tokens of a pass for each stop string in turn, then for stop tokens. A
search token by token may find another end first. If a request is aborted, SGLang keeps all accepted
tokens of the pass, even after a stop or `max_new_tokens`.

SGLang counts reasoning tokens and accepted drafts before it looks for the end. We take the tokens
after the end out of these counts.

A search for a stop regex that takes too long ends its request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_qspec.engine.boundary.guard import guarded_hook
from sglang_qspec.engine.boundary.hook import AROUND, Hook, OnError
from sglang_qspec.engine.passes import prefill_tokens
from sglang_qspec.engine.passes.request_record import record_of
from sglang_qspec.engine.scheduler.search_limit import (
    SECONDS,
    SearchTooLongError,
    search_limit,
)
from sglang_qspec.errors import shown


def watch(reqs: Sequence[Any], *, plain: bool, early: bool) -> None:
    """Let the next call of `Req.update_finish_state` for each of `reqs` be this module's.

    SGLang calls it when it has added the tokens of a pass. A `plain` pass gives one token. Then
    most requests are left to SGLang, whose own search finds the same end. Before an `early` pass no
    request waits for tokens of its prefill.
    """
    if plain:
        reqs = [
            req
            for req in reqs
            if req.reasoning_tokens
            or req.sampling_params.stop_regex_strs
            or not (early or _is_searched(req))
        ]
    for req in reqs:
        if req.finished_reason is None and not req.is_retracted:
            req.update_finish_state = partial(_end_once, req)


def _is_searched(req: Any) -> bool:
    """Whether all tokens before the new ones are in the output, and have been searched."""
    record = record_of(req)
    return record.prefill is None and not record.unsearched


def _end_once(req: Any, new_accepted_len: int = 1) -> None:
    del req.update_finish_state
    _guarded(type(req).update_finish_state, req, new_accepted_len)


def update_finish_state(
    update: Callable[[Any, int], None], req: Any, new_accepted_len: int = 1
) -> None:
    """Around `Req.update_finish_state`, after `new_accepted_len` tokens joined the output.

    SGLang adds one token of a prefill. If the prefill accepted drafts, this adds the others.
    """
    if req.finished():
        return
    if new_accepted_len:
        new_accepted_len += prefill_tokens.commit(req)
    patterns = req.sampling_params.stop_regex_strs
    if not patterns:
        _update(update, req, new_accepted_len)
        return
    output_ids = req.output_ids[:]
    try:
        with search_limit():
            _update(update, req, new_accepted_len)
    except SearchTooLongError:
        req.output_ids[:] = output_ids
        req.finished_reason, req.finished_len = _too_long(patterns), len(output_ids)


_guarded = guarded_hook(
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        update_finish_state,
        AROUND,
        OnError.SKIP,
    )
)


def _too_long(patterns: list[str]) -> FINISH_ABORT:
    message = (
        f"stop_regex is {shown(patterns)}, but must be patterns that can be searched for in "
        f"{SECONDS} s; repetitions inside repetitions take longer"
    )
    return FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _update(update: Callable[[Any, int], None], req: Any, new_accepted_len: int) -> None:
    aborted = req.to_finish is not None
    update(req, new_accepted_len)
    if not req.finished():
        return
    params = req.sampling_params
    if new_accepted_len > 1 and aborted:
        # Without drafts the pass would give one token, so the output keeps one token of the pass.
        req.finished_len = len(req.output_ids) - new_accepted_len + 1
    elif new_accepted_len > 1 and (params.stop_strs or params.stop_regex_strs):
        _find_first(update, req, new_accepted_len)
    if req.finished_len is not None:
        _discount(req, new_accepted_len)


def _discount(req: Any, run: int) -> None:
    """Take the tokens after the end of the output out of the counts of a request.

    `run` is the number of tokens that the last pass gave, the target's own token included.
    """
    # Reasoning is at the beginning of the output. Without its whole start tag there is none.
    begun = req.finished_len >= req._think_start_match_len
    req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len) if begun else 0
    drafts, kept = run - 1, run - (len(req.output_ids) - req.finished_len)
    histogram = req.spec_correct_drafts_histogram
    # A prefill does not count its drafts there.
    if 0 <= kept < drafts < len(histogram) and histogram[drafts]:
        histogram[drafts] -= 1
        histogram[kept] += 1
        req.spec_num_correct_drafts -= drafts - kept


def _find_first(update: Callable[[Any, int], None], req: Any, new_accepted_len: int) -> None:
    """Repeat the check token by token; tokens after the end stay in `output_ids`, as in SGLang.

    If the check raises, the request keeps SGLang's own decision.
    """
    output_ids, grammar = req.output_ids[:], req.grammar
    finish = req.finished_reason, req.finished_len
    try:
        run = list(req.output_ids[-new_accepted_len:])
        del req.output_ids[-new_accepted_len:]
        # The grammar has consumed all accepted tokens, so its state fits only the last one.
        req.grammar = None
        req.finished_reason = req.finished_len = None
        while run and not req.finished():
            req.output_ids.append(run.pop(0))
            if not run:
                req.grammar = grammar
            update(req, 1)
        if req.finished() and req.finished_len is None:
            req.finished_len = len(req.output_ids)
        finish = req.finished_reason, req.finished_len
    finally:
        req.output_ids[:] = output_ids
        req.grammar = grammar
        req.finished_reason, req.finished_len = finish
