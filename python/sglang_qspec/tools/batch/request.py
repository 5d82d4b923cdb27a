"""The request that a line becomes: with guesses, and streamed if no part of its answer is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_qspec.guess_tags import GUESSES_KEY, OPEN_TAG
from sglang_qspec.tools.batch.abilities import Abilities
from sglang_qspec.tools.batch.line import FIGURES, RESPONSES, Line
from sglang_qspec.tools.guesses.guess import Guess, fitted, joined

STREAMED_KEYS = frozenset(
    {
        *("messages", "prompt", "model", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "ignore_eos"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "stop_regex", "skip_special_tokens", "no_stop_trim"),
        *("response_format", "json_schema", "regex", "ebnf", "chat_template_kwargs"),
        *("custom_params", "lora_path", "priority", "extra_key", "cache_salt", "user", "stream"),
        FIGURES,
    }
)
"""Keys of requests whose answers are the same with and without streaming, apart from their form."""
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent to a server."""

    body: bytes
    guessed: bool
    """Whether the batch has added guesses."""


def request_of(
    line: Line, guesses: Sequence[Guess], abilities: Abilities, *, stream: bool
) -> Request:
    """The request for a line to a server. With `stream` its answer is streamed if it can be."""
    body = msgspec.json.decode(line.body)
    streams = stream and _can_stream(line, body, abilities)
    guessed = False
    if guesses and abilities.guesses is not None and _takes_guesses(line, body):
        custom = body.get("custom_params") or {}
        body["custom_params"] = joined(custom, fitted(guesses, abilities.guesses))
        guessed = body["custom_params"] is not custom
    named = line.url == RESPONSES and body.get("model") is None and abilities.model is not None
    if named:
        body["model"] = abilities.model
    if streams:
        body |= STREAM
    if abilities.priority is not None:
        body["priority"] = abilities.priority
    changed = streams or guessed or named or abilities.priority is not None
    data = msgspec.json.encode(body) if changed else line.body
    return Request(data, guessed)


def _can_stream(line: Line, body: dict[str, Any], abilities: Abilities) -> bool:
    """Whether the pieces of the streamed answer have all that the answer itself would have."""
    return (
        line.url in abilities.streams
        and body.keys() <= STREAMED_KEYS
        and _is_one_prompt(body.get("prompt"))
    )


def _is_one_prompt(prompt: Any) -> bool:
    """Whether a request has messages (its prompt is None), one text or the token ids of one."""
    return not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)


def _takes_guesses(line: Line, body: dict[str, Any]) -> bool:
    """Whether guesses may be added: they would make tags in the prompt literal text.

    Requests to RESPONSES have no `custom_params`.
    """
    custom = body.get("custom_params") or {}
    if line.url == RESPONSES:
        return False
    if not isinstance(custom, dict) or not _is_one_prompt(body.get("prompt")):
        return False
    texts = msgspec.json.encode([body.get("messages"), body.get("prompt")])
    return GUESSES_KEY in custom or OPEN_TAG.encode() not in texts
