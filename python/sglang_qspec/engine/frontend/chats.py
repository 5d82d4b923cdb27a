"""Reads guesses from the tags in chat messages.

OpenAI's, Anthropic's and Ollama's chats have different schemas. We read tags in the client's
schema, before SGLang converts the request. After the conversion, Anthropic's tool results would be
text of a user, and `/v1/responses` would have stored the tags for later turns.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

from starlette.responses import JSONResponse

from sglang_qspec import config
from sglang_qspec.engine.frontend import fields, guesses, tags
from sglang_qspec.errors import RequestError

_responding: ContextVar[dict[str, Any] | None] = ContextVar("_responding", default=None)
"""`custom_params` of a request to `/v1/responses`, because its schema has no such field."""


def process_messages(serving: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before `OpenAIServingChat._process_messages`, which `/tokenize` and others call too."""
    reader = tags.reader(serving.tokenizer_manager, request.custom_params)
    if reader is None:
        return
    request.messages = reader.messages(request.messages)
    if reader.guesses:
        request.custom_params = guesses.add(request.custom_params, reader.guesses)


def convert_chat(result: tuple[Any, Any], serving: Any, *args: Any, **kwargs: Any) -> None:
    """After `OpenAIServingChat._convert_to_internal_request`: check before a stream can start."""
    guesses.resolve_of_client(serving.tokenizer_manager, result[0])


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
    # Set even without guesses, so that `process_messages` takes the remaining tags as text.
    chat.custom_params = guesses.add(chat.custom_params, reader.guesses)
    return chat


async def create_responses(
    create: Callable[..., Any], serving: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `OpenAIServingResponses.create_responses`."""
    manager = serving.tokenizer_manager
    if not manager or not config.is_qspec(manager.server_args):
        return await create(serving, request, *args, **kwargs)
    reader = tags.reader(manager, None)
    given = request.input
    changes: dict[str, Any] = {}
    custom_params: dict[str, Any] = {}
    try:
        if reader is not None:
            changes = {
                "input": reader.text(given) if isinstance(given, str) else reader.messages(given),
                "instructions": reader.other(request.instructions),
            }
            custom_params = guesses.add(None, reader.guesses)
        # A stream cannot become HTTP 400 later.
        params = request.to_sampling_params(None, serving.default_sampling_params)
        guesses.resolve_params(manager, {**params, "custom_params": custom_params})
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
    """Around `OllamaServing.handle_generate`, which joins system prompt and prompt."""

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
    manager = serving.tokenizer_manager
    if not config.is_qspec(manager.server_args):
        return await handle(serving, request, *args, **kwargs)
    options = dict(request.options or {})
    try:
        custom_params = fields.custom_params_of(options)
        reader = tags.reader(manager, custom_params)
        if reader is not None:
            changes = read(reader)
            if reader.guesses:
                options["custom_params"] = guesses.add(custom_params, reader.guesses)
            request = request.model_copy(update={**changes, "options": options})
        params = serving._convert_options_to_sampling_params(options)
        guesses.resolve_params(manager, params)  # only a check
    except RequestError as error:
        return JSONResponse(status_code=400, content={"error": str(error)})
    if request.stream:
        serving = copy.copy(serving)
        serving.tokenizer_manager = _WithAnEmptyEnd(manager)
    return await handle(serving, request, *args, **kwargs)


class _WithAnEmptyEnd:
    """A `TokenizerManager` that sends the last text of an answer before the piece with its end.

    SGLang's Ollama streams drop the text of the last piece, which with drafts is a whole run.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, *args: Any) -> AsyncIterator[dict[str, Any]]:
        async for piece in self._manager.generate_request(*args):
            meta_info = piece.get("meta_info", {})
            if meta_info.get("finish_reason") is not None:
                yield {**piece, "meta_info": {**meta_info, "finish_reason": None}}
            yield piece


def ollama_params(
    result: dict[str, Any], serving: Any, options: dict[str, Any] | None = None
) -> None:
    """After `OllamaServing._convert_options_to_sampling_params`.

    It drops `custom_params`, and passes on `seed` by a name that SGLang does not know.
    """
    if not config.is_qspec(serving.tokenizer_manager.server_args):
        return
    if options and "custom_params" in options:
        result["custom_params"] = options["custom_params"]
    if "seed" in result:
        result["sampling_seed"] = result.pop("seed")
