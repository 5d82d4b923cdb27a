"""Chats: messages with roles, of which those of users are searched for tags.

OpenAI's chat completions, Anthropic's messages and Ollama's chat each have their own form. Tags
are read in the client's own form, before SGLang turns it into another: Anthropic's tool results
would otherwise come as text of a user, and `/v1/responses` keeps its input for later turns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_qspec.engine.frontend import guesses, tags
from sglang_qspec.errors import RequestError

_responding: ContextVar[dict[str, Any] | None] = ContextVar("_responding", default=None)
"""`custom_params` of the request that `/v1/responses` serves: its schema has no such field."""


def process_messages(serving: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before `OpenAIServingChat._process_messages`, also of `/tokenize` and `/invocations`."""
    reader = tags.reader(serving.tokenizer_manager, request.custom_params)
    if reader is None:
        return
    request.messages = reader.messages(request.messages)
    if reader.guesses:
        request.custom_params = guesses.add(request.custom_params, reader.guesses)


def convert_chat(result: tuple[Any, Any], serving: Any, *args: Any, **kwargs: Any) -> None:
    """After `OpenAIServingChat._convert_to_internal_request`: an error is a 400 for streams too."""
    guesses.resolve_request(serving.tokenizer_manager, result[0])


def convert_anthropic(convert: Callable[..., Any], serving: Any, request: Any) -> Any:
    """Around `AnthropicServing._convert_to_chat_completion_request`."""
    reader = tags.reader(serving.openai_serving_chat.tokenizer_manager, None)
    if reader is None:
        return convert(serving, request)
    changes = {
        "messages": reader.messages(request.messages),
        "system": reader.other(request.system),
    }
    chat = convert(serving, request.model_copy(update=changes))
    # Also without any guess: it tells `process_messages` that the tags that are left are text.
    chat.custom_params = guesses.add(chat.custom_params, reader.guesses)
    return chat


async def create_responses(
    create: Callable[..., Any], serving: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `OpenAIServingResponses.create_responses`."""
    manager = serving.tokenizer_manager
    reader = tags.reader(manager, None) if manager else None
    if reader is None:
        return await create(serving, request, *args, **kwargs)
    given = request.input
    try:
        changes = {
            "input": reader.text(given) if isinstance(given, str) else reader.messages(given),
            "instructions": reader.other(request.instructions),
        }
        custom_params = guesses.add(None, reader.guesses)
        guesses.resolve(manager, custom_params)  # only to check: a stream could not become a 400
    except RequestError as error:
        return serving.create_error_response(str(error))
    token = _responding.set(custom_params)
    try:
        return await create(serving, request.model_copy(update=changes), *args, **kwargs)
    finally:
        _responding.reset(token)


def responses_params(result: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """After `ResponsesRequest.to_sampling_params`, which `create_responses` calls."""
    custom_params = _responding.get()
    if custom_params:
        result["custom_params"] = custom_params


async def ollama_chat(
    handle: Callable[..., Any], serving: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `OllamaServing.handle_chat`."""

    def read(reader: tags.TagReader) -> dict[str, Any]:
        return {"messages": reader.messages(request.messages)}

    return await _ollama(handle, serving, request, read, *args, **kwargs)


async def ollama_generate(
    handle: Callable[..., Any], serving: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `OllamaServing.handle_generate`, which puts system prompt and prompt together."""

    def read(reader: tags.TagReader) -> dict[str, Any]:
        return {"prompt": reader.text(request.prompt), "system": reader.other(request.system)}

    return await _ollama(handle, serving, request, read, *args, **kwargs)


async def _ollama(
    handle: Callable[..., Any],
    serving: Any,
    request: Any,
    read: Callable[[tags.TagReader], dict[str, Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    from starlette.responses import JSONResponse

    manager = serving.tokenizer_manager
    if not guesses.is_qspec(manager):
        return await handle(serving, request, *args, **kwargs)
    options = dict(request.options or {})
    custom_params = options.get("custom_params")
    reader = tags.reader(manager, custom_params)
    try:
        if reader is not None:
            changes = read(reader)
            if reader.guesses:
                options["custom_params"] = guesses.add(custom_params, reader.guesses)
            request = request.model_copy(update={**changes, "options": options})
        if isinstance(options.get("custom_params"), dict):
            guesses.resolve(manager, options["custom_params"])  # only to check, as above
    except RequestError as error:
        return JSONResponse(status_code=400, content={"error": str(error)})
    return await handle(serving, request, *args, **kwargs)


def ollama_params(
    result: dict[str, Any], serving: Any, options: dict[str, Any] | None = None
) -> None:
    """After `OllamaServing._convert_options_to_sampling_params`, which knows no `custom_params`."""
    if options and "custom_params" in options and guesses.is_qspec(serving.tokenizer_manager):
        result["custom_params"] = options["custom_params"]
