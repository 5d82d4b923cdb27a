"""Checks the guesses of a request and turns them into token ids for the scheduler.

Guesses from tags join `qspec_guesses` of the request's `custom_params`. Before the request is sent
to the scheduler, `resolve` checks them and turns them into token ids, next to those that the client
sent as `qspec_guess_ids`.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_qspec import config, controls
from sglang_qspec.config import QSpecConfig
from sglang_qspec.errors import GuessError, RequestError
from sglang_qspec.guess import (
    GUESS_IDS_KEY,
    GUESS_KEYS,
    GUESSES_KEY,
    GuessLimits,
    flatten,
    read_guess_ids,
    read_guess_texts,
)

_SETTLED = "_qspec_settled"
"""Attribute of a request object that is checked, and has its guesses as token ids."""


def is_qspec(manager: Any) -> bool:
    """Whether the server of this `TokenizerManager` runs QSPEC."""
    return (manager.server_args.speculative_algorithm or "").upper() == "QSPEC"


@functools.cache
def settings() -> QSpecConfig:
    """The settings of this server."""
    return config.from_environment()


@functools.cache
def limits() -> GuessLimits:
    """Caps on the guesses of a request."""
    return GuessLimits(settings().max_guesses, settings().max_guess_tokens)


def add(custom_params: dict[str, Any] | None, texts: list[str]) -> dict[str, Any]:
    """`custom_params` with the guesses of a request's tags. Raises GuessError over a cap."""
    limits().check_texts(texts)
    return {**(custom_params or {}), GUESSES_KEY: texts}


def resolve_request(manager: Any, obj: Any) -> None:
    """Check a `GenerateReqInput`, and turn its guesses into token ids; a second call does nothing.

    Raises RequestError.
    """
    if getattr(obj, _SETTLED, False) or not hasattr(obj, "sampling_params"):
        return
    if not is_qspec(manager):
        return
    _check_not_empty(manager, obj)
    params = obj.sampling_params
    if isinstance(params, list):
        obj.sampling_params = [_settle_params(manager, own) for own in params]
    else:
        obj.sampling_params = _settle_params(manager, params)
    setattr(obj, _SETTLED, True)


def _settle_params(manager: Any, params: Any) -> Any:
    custom_params = params.get("custom_params") if isinstance(params, dict) else None
    if not isinstance(custom_params, dict):
        return params
    # A copy: the dict of a program that calls sgl.Engine is not ours to change.
    return {**params, "custom_params": resolve(manager, custom_params)}


def resolve(manager: Any, custom_params: dict[str, Any]) -> dict[str, Any] | None:
    """`custom_params` with all guesses as one flat list of token ids; None if nothing is left.

    Raises RequestError for controls and guesses that are malformed or not allowed.
    """
    # That of the server's arguments is None where it was left to the default.
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
    settled = {key: value for key, value in custom_params.items() if key not in GUESS_KEYS}
    if kept:
        settled[GUESS_IDS_KEY] = flatten(kept)
    return settled or None


def _tokenize(manager: Any, guess: str) -> tuple[int, list[list[int]]]:
    """The number of tokens of a guess as it was written, and its token ids in both spacings.

    A guess continues text whose end is unknown, so it is kept with and without a space before it:
    the two usually differ in their first token only.
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
    """A prompt without a token, as one that was only a guess, would end SGLang's scheduler."""
    texts = [obj.text] if isinstance(obj.text, str) else obj.text or []
    if all(texts) or manager.tokenizer is None or obj.session_params or obj.contains_mm_input():
        return
    if not manager.tokenizer.encode(""):
        raise RequestError("the prompt is empty (guesses are no part of it); it must hold a token")
