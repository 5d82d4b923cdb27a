"""Ends an output at the token where decoding token by token would end it.

SGLang searches all accepted tokens of a pass for each stop string in turn, then for stop tokens. A
search token by token may find another end first. If a request is aborted, SGLang keeps all accepted
tokens of the pass, even after a stop or `max_new_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_qspec.engine.passes import prefill


def update_finish_state(
    update: Callable[[Any, int], None], req: Any, new_accepted_len: int = 1
) -> None:
    """Around `Req.update_finish_state`, after `new_accepted_len` tokens joined the output.

    SGLang adds one token of a prefill. If the prefill accepted drafts, this hook adds the others.
    """
    if req.finished():
        return
    if new_accepted_len:
        new_accepted_len += prefill.commit(req)
    aborted = req.to_finish is not None
    update(req, new_accepted_len)
    if new_accepted_len < 2 or not req.finished():
        return
    params = req.sampling_params
    if aborted:
        # Without drafts the pass would give one token, so the output keeps one token of the pass.
        req.finished_len = len(req.output_ids) - new_accepted_len + 1
    elif params.stop_strs or params.stop_regex_strs:
        _find_first(update, req, new_accepted_len)


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
