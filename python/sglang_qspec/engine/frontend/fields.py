"""Refuses requests with a field that SGLang's scheduler cannot serve.

SGLang checks some fields in the process that serves clients, and the scheduler takes the others as
they come. A value of another type, or a number that a tensor cannot hold, would end the scheduler
and all its requests. So each sampling parameter must have the type of its field in SGLang's
`SamplingParams`, and fields keep the rules below.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import SessionParams

from sglang_qspec import controls
from sglang_qspec.errors import RequestError, shown

MAX_SAMPLES = 4096
"""Maximum number of answers of a request with `n` above 1. SGLang keeps a state for each answer
from the start, so a short request could take all memory."""
MAX_LOGPROBS = 1 << 24
"""Maximum number of log probabilities of a request besides those of its tokens. Each takes a few
hundred bytes on its way to the client."""
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
_FLOAT32 = (2 - 2**-23) * 2.0**127
"""The largest finite float32."""


class Rule(NamedTuple):
    """What a field may hold."""

    allowed: str
    """In messages, after "must be"; `{vocab_size}` and `{last_id}` are filled in."""
    accepts: Callable[[Any, int], bool]
    """Whether a value is allowed in a model with this vocabulary size; an error means no."""


def _whole(low: int, high: int) -> Rule:
    return Rule(
        f"a whole number from {low} to {high}", lambda value, _: _is_whole(value, low, high)
    )


def _is_whole(value: Any, low: int, high: int) -> bool:
    # isinstance would accept a bool as an int.
    return type(value) is int and low <= value <= high


def _are_token_ids(value: Any, vocab_size: int) -> bool:
    return len(value) > 0 and bool(min(value) >= 0 and max(value) < vocab_size)


def _are_biases(value: Any, vocab_size: int) -> bool:
    return all(
        0 <= int(token_id) < vocab_size and bias <= _FLOAT32  # false for NaN
        for token_id, bias in value.items()
    )


def _are_patterns(value: Any, _: int) -> bool:
    try:
        for pattern in [value] if isinstance(value, str) else value:
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


SAMPLING = {
    "n": _whole(1, MAX_SAMPLES),
    "top_k": _whole(-1, _INT32),
    "min_new_tokens": _whole(0, _INT32),
    "stream_interval": _whole(1, _INT64),
    "temperature": Rule(
        f"a number from 0 to {_FLOAT32:g}", lambda value, _: 0 <= value <= _FLOAT32
    ),
    "logit_bias": Rule(
        f"an object with token ids from 0 to {{last_id}} and numbers up to {_FLOAT32:g}",
        _are_biases,
    ),
    "stop_regex": Rule("a regular expression of Python, or a list of them", _are_patterns),
    "is_normalized": Rule("false", lambda value, _: not value),
}
"""Rules of fields of `sampling_params`. `SamplingParams.verify` has further ones."""
REQUEST = {
    "logprob_start_len": _whole(-1, _INT64),
    "top_logprobs_num": Rule(
        "a whole number from 0 to {vocab_size}",
        lambda value, vocab_size: _is_whole(value, 0, vocab_size),
    ),
    "custom_logit_processor": Rule(
        "a text that CustomLogitProcessor.to_str has made",
        lambda value, _: value == "" or bool(bytes.fromhex(json.loads(value)["callable"])),
    ),
}
"""Rules of other fields of a request, which have one value, or a list with one for each prompt."""
_OF_THE_SERVER = (
    *("http_worker_ipc", "lora_id", "token_indices_to_pool", "multi_item_delimiter_indices"),
    *("positional_embed_overrides", "need_wait_for_mm_inputs", "num_items_assigned"),
    "encoder_urls",
)
"""Fields that SGLang itself sets, and does not expect from a client."""
_RID = Rule(
    f"a text that is not empty and does not begin with {HEALTH_CHECK_RID_PREFIX}",
    lambda value, _: len(value) > 0 and not value.startswith(HEALTH_CHECK_RID_PREFIX),
)
_TOKEN_IDS = Rule("one or more token ids from 0 to {last_id}", _are_token_ids)
_CONVERTED = frozenset({"custom_params", "stop_token_ids", "watermark"})
"""Sampling parameters of which SGLang takes values of other types than `SamplingParams` has."""


def check_client(obj: Any) -> None:
    """Check the fields of a `GenerateReqInput` that a client may not set, or not to all values.

    The server itself sets them to others. Raises RequestError, as all functions of this module.
    """
    for name in _OF_THE_SERVER:
        value = getattr(obj, name)
        if value is not None:
            raise RequestError(
                f"{name} is {shown(value)}, but must be left out: the server sets it"
            )
    for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        _keep("rid", rid, _RID, 0)


def check_request(manager: Any, obj: Any) -> None:
    """Check the fields of a `GenerateReqInput`, except its sampling parameters."""
    vocab_size = manager.model_config.vocab_size
    if not obj.contains_mm_input():
        for prompt in prompts_of(obj) if obj.text is None else ():
            _keep("input_ids", prompt, _TOKEN_IDS, vocab_size)
    if obj.text is None and obj.input_ids is None and obj.input_embeds is not None:
        _check_embeds(manager.model_config, obj.input_embeds)
    _typed_fields("session_params", _object("session_params", obj.session_params), SessionParams)
    for name, rule in REQUEST.items():
        given = getattr(obj, name, None)
        for value in given if isinstance(given, list) and is_batch(obj) else [given]:
            _keep(name, value, rule, vocab_size)


def _check_embeds(model_config: Any, embeds: Any) -> None:
    if model_config.dtype != torch.bfloat16:
        raise RequestError(
            f"input_embeds need a model in torch.bfloat16, but it is in {model_config.dtype}"
        )
    size = model_config.hidden_size
    rule = Rule(
        f"one or more lists of {size} numbers",
        lambda rows, _: (
            len(rows) > 0 and all(len(row) == size and math.isfinite(sum(row)) for row in rows)
        ),
    )
    is_batch = bool(embeds) and bool(embeds[0]) and isinstance(embeds[0][0], list)
    for rows in embeds if is_batch else [embeds]:
        _keep("input_embeds", rows, rule, 0)


def check_samples(obj: Any) -> None:
    """Check the number of answers of a request with checked sampling parameters."""
    params = obj.sampling_params
    if params == []:
        raise RequestError("sampling_params is [], but must have an object for each prompt")
    n = (params[0] if isinstance(params, list) else params).get("n") or 1
    prompts = len(prompts_of(obj))
    if n > 1 and n * prompts > MAX_SAMPLES:
        most = max(1, MAX_SAMPLES // prompts)
        raise RequestError(f"n is {n}, but must be at most {most} with {prompts} prompts")


def _given(obj: Any) -> Any:
    return obj.input_ids if obj.text is None else obj.text


def is_batch(obj: Any) -> bool:
    """Whether a `GenerateReqInput` has a list of prompts. A list of token ids is one prompt."""
    given = _given(obj)
    return bool(given) and not isinstance(given, str) and not isinstance(given[0], int)


def prompts_of(obj: Any) -> Sequence[Any]:
    """The prompts of a request, texts or lists of token ids. A session may have the only prompt."""
    given: Sequence[Any] = _given(obj) or ()
    return given if is_batch(obj) or not given else [given]


def check_prompt(manager: Any, obj: Any, input_ids: Any) -> None:
    """Check the token ids of one prompt, and how many log probabilities the request asks for.

    A tokenizer may have more tokens than the model. The ids of a prompt with images are not
    checked, because the model replaces some of them.
    """
    if obj.contains_mm_input() or not input_ids:
        return
    _keep("the prompt", input_ids, _TOKEN_IDS, manager.model_config.vocab_size)
    if not getattr(obj, "return_logprob", False):
        return
    room = max(0, manager.context_len - len(input_ids))
    asked = obj.sampling_params.get("max_new_tokens")
    positions = room if asked is None else min(asked, room)
    if obj.logprob_start_len >= 0:
        positions += max(0, len(input_ids) - obj.logprob_start_len)
    each = obj.top_logprobs_num + len(obj.token_ids_logprob or ())
    if each * positions > MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs_num and token_ids_logprob ask for {each} log probabilities at each of "
            f"{positions} positions, but must be at most {MAX_LOGPROBS} in all: lower them or "
            "max_new_tokens, or raise logprob_start_len"
        )


def check_sampling(manager: Any, params: Any) -> dict[str, Any]:
    """The `sampling_params` of one prompt with values of the types that the scheduler expects."""
    params = _object("sampling_params", params)
    vocab_size = manager.model_config.vocab_size
    checked = _typed_fields("sampling_params", params, manager.sampling_params_class)
    for name, rule in SAMPLING.items():
        _keep(name, checked.get(name), rule, vocab_size)
    if params.get("stop_token_ids"):
        checked["stop_token_ids"] = _possible_stops(params["stop_token_ids"], vocab_size)
    _verify(manager, checked)
    return checked


def custom_params_of(params: Any) -> dict[str, Any]:
    """The `custom_params` among the sampling parameters of one prompt, or an empty dict."""
    return controls.as_object(_object("sampling_params", params).get("custom_params"))


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise RequestError(f"{name} is {shown(value)}, but must be an object")
    return value or {}


def _keep(name: str, value: Any, rule: Rule, vocab_size: int) -> None:
    if value is None:
        return
    try:
        kept = rule.accepts(value, vocab_size)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        kept = False
    if not kept:
        allowed = rule.allowed.format(vocab_size=vocab_size, last_id=vocab_size - 1)
        raise RequestError(f"{name} is {shown(value)}, but must be {allowed}")


def _typed_fields(of: str, values: Mapping[str, Any], struct: type) -> dict[str, Any]:
    """The values of an object with the types of the fields of SGLang's `struct`."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(struct)}
    typed = dict(values)
    for name, value in values.items():
        if name not in kinds:
            known = ", ".join(kinds)
            raise RequestError(f"{shown(name)} in {of} is not known; allowed are {known}")
        if name not in _CONVERTED and value is not None:
            typed[name] = _typed(name, value, kinds[name])
    return typed


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value with its field's type. Whole floats become integers, and 0 and 1 become bools."""
    if isinstance(value, dict):  # JSON has only texts as keys, but a program may use token ids
        value = {str(key): item for key, item in value.items()}
    try:
        # Not strict, msgspec would also read texts as numbers.
        return msgspec.convert(value, kind, strict=isinstance(value, str))
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{name} is {shown(value)}, but must be {_text_of(kind)}") from error


def _text_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _possible_stops(ids: Any, vocab_size: int) -> list[int]:
    """The stop tokens that the model can choose. SGLang ignores the others, or fails."""
    try:
        stops = {int(token_id) for token_id in ids if token_id is not None}
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(
            f"stop_token_ids is {shown(ids)}, but must be a list of whole numbers"
        ) from error
    return sorted(token_id for token_id in stops if 0 <= token_id < vocab_size)


def _verify(manager: Any, params: dict[str, Any]) -> None:
    """SGLang's own checks, which it makes later, when a stream has begun."""
    try:
        made = manager.sampling_params_class(**params)
        made.normalize(manager.tokenizer)
        made.verify(manager.model_config.vocab_size)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the sampling_params are not allowed: {error}") from error
