"""Finds stop strings where the text has them, and sends no part of one.

SGLang looks for a stop string in the last tokens of the output, as many as the stop string has on
its own and one more. A model may write the same text in more tokens. SGLang would then miss the
stop string, and cut the text there when it finds a later one. It holds the output of a stream back
while the text ends with the beginning of a stop string, but not if an incomplete character follows,
and not for parts of an answer without a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_qspec import config
from sglang_qspec.engine.frontend import byte_tokens

_BYTES = 4
"""Maximum number of bytes, and so of tokens, of a character."""


def repair_scheduler(result: None, scheduler: Any) -> None:
    """After `Scheduler.init_tokenizer`: decode as the detokenizer does."""
    if config.is_qspec(get_spec()):
        byte_tokens.repair(scheduler.tokenizer)


def widen(params: Any) -> None:
    """Let SGLang look for the stop strings of a new request in all tokens that they may have."""
    params.stop_str_max_len = max((len(stop.encode()) for stop in params.stop_strs), default=0)
    params.stop_regex_max_len *= _BYTES


def without_begun(reqs: Sequence[Any]) -> list[Any]:
    """The requests of `reqs` without an open stop string: no beginning of one ends the output."""
    return [
        req
        for req in reqs
        if not ((params := req.sampling_params).stop_strs or params.stop_regex_strs)
        or not has_begun(req)
    ]


def has_begun(req: Any) -> bool:
    """Whether the complete characters of the output end with the beginning of a stop string.

    The literal text of a stop regex counts too, since SGLang cuts it off like a stop string.
    """
    params = req.sampling_params
    stops = (*params.stop_strs, *params.stop_regex_strs)
    if not stops or req.finished():
        return False
    text = req.tail_str().rstrip("\ufffd")
    return any(
        text.endswith(stop[:length])
        for stop in stops
        for length in range(1, min(len(stop), len(text)) + 1)
    )
