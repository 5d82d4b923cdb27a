"""Checks a request and turns its guesses into token ids for the scheduler.

Guesses from tags become `qspec_guesses` in the request's `custom_params`. Before SGLang sends the
request to the scheduler, `resolve` checks them, and appends their token ids to `qspec_guess_ids`.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_qspec import config, controls
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.frontend import fields
from sglang_qspec.errors import GuessError, RequestError
from sglang_qspec.guess_tags import (
    GUESS_IDS_KEY,
    GUESS_KEYS,
    GUESSES_KEY,
    GuessLimits,
    flatten,
    read_guess_ids,
    read_guess_texts,
)

_RESOLVED = "_qspec_resolved"
"""Attribute that marks a request object with checked guesses in token ids."""


@functools.cache
def settings() -> QSpecConfig:
    """The settings of this server."""
    return config.from_environment()


@functools.cache
def limits() -> GuessLimits:
    """Caps on the guesses of a request."""
    return GuessLimits(settings().max_guesses, settings().max_guess_tokens)


def add(custom_params: dict[str, Any] | None, texts: list[str]) -> dict[str, Any]:
    """`custom_params` with the guesses of a request's tags. Raises GuessError above a cap."""
    limits().check_texts(texts)
    return {**(custom_params or {}), GUESSES_KEY: texts}


def resolve_request(manager: Any, obj: Any) -> None:
    """Check a `GenerateReqInput`, and turn its guesses into token ids; a second call does nothing.

    Raises RequestError.
    """
    if getattr(obj, _RESOLVED, False) or not hasattr(obj, "session_params"):  # an embedding
        return
    if not config.is_qspec(manager.server_args):
        return
    fields.check_request(manager, obj)
    _check_not_empty(manager, obj)
    params = obj.sampling_params
    if isinstance(params, list):
        obj.sampling_params = [resolve_params(manager, own) for own in params]
    else:
        obj.sampling_params = resolve_params(manager, params)
    fields.check_samples(obj)
    setattr(obj, _RESOLVED, True)


def resolve_of_client(manager: Any, obj: Any) -> None:
    """`resolve_request` for a request that a client made, in which the server has set nothing."""
    if config.is_qspec(manager.server_args):
        fields.check_client(obj)
    resolve_request(manager, obj)


def resolve_params(manager: Any, params: Any) -> dict[str, Any]:
    """The checked sampling parameters of a prompt, with its guesses as token ids.

    Raises RequestError.
    """
    # A copy, because the dict belongs to the program that calls sgl.Engine.
    checked = fields.check_sampling(manager, params)
    custom_params = fields.custom_params_of(checked)
    if custom_params:
        checked["custom_params"] = resolve(manager, custom_params)
    return checked


def resolve(manager: Any, custom_params: dict[str, Any]) -> dict[str, Any] | None:
    """`custom_params` with all guesses as one flat list of token ids; None if nothing is left.

    Raises RequestError for controls and guesses that are malformed or not allowed.
    """
    # `manager.server_args` has no width if the flag is not given, so read the resolved width.
    controls.read(custom_params, settings(), get_spec().speculative_num_draft_tokens)
    texts, ids = (custom_params.get(key) for key in (GUESSES_KEY, GUESS_IDS_KEY))
    sent = [] if ids is None else read_guess_ids(ids, manager.model_config.vocab_size)
    written = [] if texts is None else read_guess_texts(texts)
    limits().check_number(len(sent) + len(written))
    limits().check_texts(written)
    kept = list(sent)
    tokens = sum(map(len, sent))
    for text in written:
        size, spacings = _tokenize(manager, text)
        tokens += size
        kept += spacings
    limits().check_tokens(tokens)
    resolved = {key: value for key, value in custom_params.items() if key not in GUESS_KEYS}
    if kept:
        resolved[GUESS_IDS_KEY] = flatten(kept)
    return resolved or None


def _tokenize(manager: Any, guess: str) -> tuple[int, list[list[int]]]:
    """The number of tokens of a guess as written, and its token ids without and with a space first.

    The text before a guess is unknown, so both spacings are kept. They usually differ only in the
    first token.
    """
    if manager.tokenizer is None:
        raise GuessError(
            f"a guess is text, but this server has no tokenizer (--skip-tokenizer-init); send "
            f"{GUESS_IDS_KEY} instead"
        )
    bare = guess.lstrip(" ")
    encoded = {
        text: list(manager.tokenizer.encode(text, add_special_tokens=False))
        for text in (guess, bare, " " + bare)
    }
    spacings = [encoded[text] for text in (bare, " " + bare) if encoded[text]]
    return len(encoded[guess]), spacings


def _check_not_empty(manager: Any, obj: Any) -> None:
    """Refuse a prompt without tokens, such as a prompt of tags only: it would end the scheduler."""
    texts = [obj.text] if isinstance(obj.text, str) else obj.text or []
    if all(texts) or manager.tokenizer is None or obj.session_params or obj.contains_mm_input():
        return
    if not manager.tokenizer.encode(""):
        raise RequestError(
            "the prompt is empty without its guesses, but must have at least one token"
        )
