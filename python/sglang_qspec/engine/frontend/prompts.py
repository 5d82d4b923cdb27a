"""Reads guesses from the tags in raw prompts, which the client alone has written.

These are the prompts of `/generate`, `/vertex_generate`, `/v1/completions`, native gRPC and
`sgl.Engine`. We do not read tags in `TokenizerManager.generate_request`, which also gets texts that
SGLang joined from several fields, such as rendered chats and pairs to score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

from sglang_qspec import config
from sglang_qspec.engine.frontend import fields, guesses, samples, tags
from sglang_qspec.errors import RequestError


async def serve_generate(serve: Callable[..., Any], obj: Any, request: Any) -> Any:
    """Around `serve_generate_request`: answer an error with HTTP 400 before a stream starts."""
    # `sgl.Engine` serves without this module.
    from sglang.srt.entrypoints.http_server import _global_state

    try:
        _strip_request(_global_state.tokenizer_manager, obj)
    except RequestError as error:
        return JSONResponse(status_code=400, content={"error": {"message": str(error)}})
    return await serve(obj, request)


async def run_grpc(
    run: Callable[..., Any], handle: Any, obj: Any, callback: Any, *args: Any, **kwargs: Any
) -> None:
    """Around `RuntimeHandle._run_generate`, which serves Generate of native gRPC."""
    try:
        _strip_request(handle.tokenizer_manager, obj)
    except RequestError as error:
        handle._send_native_error(callback, str(error))
        return
    await run(handle, obj, callback, *args, **kwargs)


def generate(manager: Any, obj: Any, request: Any = None) -> None:
    """Before `TokenizerManager.generate_request`, which all endpoints call."""
    guesses.resolve_request(manager, obj)
    samples.spread(manager, obj)


def tokenized(manager: Any, obj: Any, input_ids: Any) -> None:
    """Before `TokenizerManager._validate_one_request`, which gets the tokens of each prompt."""
    if config.is_qspec(manager.server_args):
        fields.check_prompt(manager, obj, input_ids)


def engine_generate(
    run: Callable[..., Any],
    engine: Any,
    prompt: Any = None,
    sampling_params: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around `Engine.generate`."""
    prompt, sampling_params = strip(engine.tokenizer_manager, prompt, sampling_params)
    return run(engine, prompt, sampling_params, *args, **kwargs)


async def engine_async_generate(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `Engine.async_generate`."""
    return await engine_generate(run, *args, **kwargs)


def convert_completion(
    convert: Callable[..., Any], serving: Any, request: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Around `OpenAIServingCompletion._convert_to_internal_request`.

    `echo` repeats the prompt, and a template for code completion joins prompt and suffix, so we
    strip both first.
    """
    manager = serving.tokenizer_manager
    params: Any = {"custom_params": request.custom_params}
    if isinstance(request.prompt, str):
        texts, params = _strip_one(manager, (request.prompt, request.suffix), params)
        request.prompt, request.suffix = texts
    else:
        request.prompt, params = strip(manager, request.prompt, params)
    adapted, request = convert(serving, request, *args, **kwargs)
    own = adapted.sampling_params
    if isinstance(params, list):
        adapted.sampling_params = [{**own, **each} for each in params]
    else:
        adapted.sampling_params = {**own, **params}
    guesses.resolve_of_client(manager, adapted)
    return adapted, request


def _strip_request(manager: Any, obj: Any) -> None:
    obj.text, obj.sampling_params = strip(manager, obj.text, obj.sampling_params)
    guesses.resolve_of_client(manager, obj)


def strip(manager: Any, prompt: Any, params: Any) -> tuple[Any, Any]:
    """The prompt, or list of prompts, without tags; and the sampling parameters with the guesses.

    `params` is one dict for all prompts, or a list with one dict each. It is returned as a list if
    a list of prompts has tags. Raises RequestError.
    """
    if not config.is_qspec(manager.server_args):
        return prompt, params
    if isinstance(prompt, str) and isinstance(params, list):  # as SGLang takes it with `n` above 1
        (text,), params = strip(manager, [prompt], params)
        return text, params
    if isinstance(prompt, str):
        (text,), params = _strip_one(manager, (prompt,), params)
        return text, params
    if not _is_texts(prompt):
        return prompt, params
    each = params if isinstance(params, list) else [params] * len(prompt)
    if len(each) != len(prompt):
        raise RequestError(
            f"sampling_params has {len(each)} items, but there are {len(prompt)} prompts: the "
            "numbers must be equal"
        )
    stripped = [_strip_one(manager, (text,), own) for text, own in zip(prompt, each, strict=True)]
    texts = [text for (text,), _ in stripped]
    return texts, params if texts == prompt else [own for _, own in stripped]


def _strip_one(manager: Any, texts: tuple[Any, ...], params: Any) -> tuple[tuple[Any, ...], Any]:
    """Strip the tags from each text of one request, where None stands for no text."""
    custom_params = fields.custom_params_of(params)
    reader = tags.reader(manager, custom_params)
    if reader is None:
        return texts, params
    texts = tuple(reader.text(text) if text else text for text in texts)
    if reader.guesses:
        custom_params = guesses.add(custom_params, reader.guesses)
        params = {**(params or {}), "custom_params": custom_params}
    return texts, params


def _is_texts(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(x, str) for x in prompt)
