"""What clients say to QSPEC in their requests, read and checked while an error still is a 400.

`<NGRAMGUESS>` tags are taken out of prompts before SGLang tokenizes them. Each endpoint keeps its
prompt in another place; all end in `TokenizerManager.generate_request`. A guess travels to the
scheduler as token ids in the request's `custom_params`, which is also how a client passes guesses
with a prompt of token ids, and where its `controls` are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_qspec import config, controls
from sglang_qspec.errors import RequestError
from sglang_qspec.guess import (
    GUESS_IDS_KEY,
    GuessLimits,
    check_guess_ids,
    check_texts,
    flatten,
    split,
)

_PARSED = "_qspec_parsed"
"""Attribute of a request object whose prompt has been looked at."""


async def serve_generate(serve: Callable[..., Any], obj: Any, request: Any) -> Any:
    """Around `serve_generate_request`: an error is a 400 for streaming requests too."""
    from sglang.srt.entrypoints.http_server import _global_state
    from starlette.responses import JSONResponse

    try:
        _take_from_request(_global_state.tokenizer_manager, obj)
    except RequestError as error:
        return JSONResponse(status_code=400, content={"error": {"message": str(error)}})
    return await serve(obj, request)


def generate(manager: Any, obj: Any, request: Any = None) -> None:
    """Before `TokenizerManager.generate_request`: the `sgl.Engine` API and all endpoints."""
    _take_from_request(manager, obj)


def process_messages(serving: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before `OpenAIServingChat._process_messages`: string contents and text parts."""
    manager = serving.tokenizer_manager
    if not _is_qspec(manager):
        return
    guesses = [] if _settings().disable_guess_tags else _take_from_messages(request.messages)
    if guesses:
        request.custom_params = _with_guesses(manager, request.custom_params, guesses)
    _check_custom_params(manager, request.custom_params)


def _take_from_messages(messages: list[Any]) -> list[str]:
    """Strip the messages of their guesses, and return these."""
    guesses: list[str] = []
    for message in messages:
        content = getattr(message, "content", None)
        if isinstance(content, str):
            message.content, found = _split(content)
            guesses += found
        elif isinstance(content, list):
            for part in content:
                if isinstance(getattr(part, "text", None), str):
                    part.text, found = _split(part.text)
                    guesses += found
    return guesses


def convert_completion(result: tuple[Any, Any], serving: Any, *args: Any, **kwargs: Any) -> None:
    """After `OpenAIServingCompletion._convert_to_internal_request`; `echo` repeats the prompt."""
    adapted, request = result
    manager = serving.tokenizer_manager
    _take_from_request(manager, adapted)
    if not _parses_tags(manager):
        return
    if isinstance(request.prompt, str):
        request.prompt = _split(request.prompt)[0]
    elif request.prompt and isinstance(request.prompt[0], str):
        request.prompt = [_split(text)[0] for text in request.prompt]


def _take_from_request(manager: Any, obj: Any) -> None:
    """Strip `obj.text` and put the guesses into each prompt's own sampling parameters."""
    if getattr(obj, _PARSED, False) or not hasattr(obj, "sampling_params"):
        return
    if not _is_qspec(manager):
        return
    setattr(obj, _PARSED, True)
    if isinstance(obj.text, str) and _parses_tags(manager):
        obj.text, guesses = _split(obj.text)
        if guesses:
            obj.sampling_params = _params_with_guesses(manager, obj.sampling_params, guesses)
    elif isinstance(obj.text, list) and _parses_tags(manager):
        _take_from_batch(manager, obj)
    _check_not_empty(manager, obj)
    params = obj.sampling_params
    for own in params if isinstance(params, list) else [params]:
        _check_custom_params(manager, (own or {}).get("custom_params"))


def _check_not_empty(manager: Any, obj: Any) -> None:
    """A prompt without a token, as one that was only a guess, would end SGLang's scheduler."""
    texts = [obj.text] if isinstance(obj.text, str) else obj.text or []
    if all(texts) or manager.tokenizer is None or obj.session_params or obj.contains_mm_input():
        return
    if not manager.tokenizer.encode(""):
        raise RequestError("the prompt is empty (guesses are no part of it); it must hold a token")


def _take_from_batch(manager: Any, obj: Any) -> None:
    pairs = [_split(text) for text in obj.text]
    if not any(guesses for _, guesses in pairs):
        return
    obj.text = [text for text, _ in pairs]
    params = obj.sampling_params
    if not isinstance(params, list):
        params = [dict(params or {}) for _ in pairs]
    obj.sampling_params = [
        _params_with_guesses(manager, own, guesses) if guesses else own
        for own, (_, guesses) in zip(params, pairs, strict=True)
    ]


def _params_with_guesses(
    manager: Any, params: dict[str, Any] | None, guesses: list[str]
) -> dict[str, Any]:
    params = dict(params or {})
    params["custom_params"] = _with_guesses(manager, params.get("custom_params"), guesses)
    return params


def _with_guesses(
    manager: Any, custom_params: dict[str, Any] | None, guesses: list[str]
) -> dict[str, Any]:
    """`custom_params` with `guesses` as token ids behind those that the client gave as ids.

    A guess continues text whose end is unknown, so it is tokenized with and without a space before
    it: the two usually differ in their first token only.
    """
    limits = _limits()
    check_texts(guesses, limits)
    vocab_size = manager.model_config.vocab_size
    custom_params = dict(custom_params or {})
    given = custom_params.get(GUESS_IDS_KEY)
    ids = [] if given is None else check_guess_ids(given, limits, vocab_size)
    for guess in guesses:
        for text in dict.fromkeys((guess.lstrip(" "), " " + guess.lstrip(" "))):
            encoded = manager.tokenizer.encode(text, add_special_tokens=False)
            if encoded:
                ids.append(list(encoded))
    custom_params[GUESS_IDS_KEY] = flatten(ids)
    return custom_params


def _check_custom_params(manager: Any, custom_params: Any) -> None:
    """Check controls and guesses given as token ids; the latter become flat."""
    if not isinstance(custom_params, dict):
        return
    # That of the server's arguments is None where it was left to the default.
    controls.read(custom_params, _settings(), get_spec().speculative_num_draft_tokens)
    if custom_params.get(GUESS_IDS_KEY) is not None:
        checked = check_guess_ids(
            custom_params[GUESS_IDS_KEY], _limits(), manager.model_config.vocab_size
        )
        custom_params[GUESS_IDS_KEY] = flatten(checked)


_settings = functools.cache(config.from_environment)


def _is_qspec(manager: Any) -> bool:
    return (manager.server_args.speculative_algorithm or "").upper() == "QSPEC"


def _parses_tags(manager: Any) -> bool:
    return _is_qspec(manager) and not _settings().disable_guess_tags


def _split(text: str) -> tuple[str, list[str]]:
    return split(text, _limits())


@functools.cache
def _limits() -> GuessLimits:
    settings = _settings()
    return GuessLimits(settings.max_guesses, settings.max_guess_tokens)
