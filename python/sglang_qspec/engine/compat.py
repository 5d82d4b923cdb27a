"""Checks SGLang's version, the installed hooks and the two models before weights load."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_qspec.engine.hooks import Hook
from sglang_qspec.errors import ConfigError
from sglang_qspec.link.fingerprint import fingerprint, first_difference

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True)
class ModelDescription:
    """The token ids of a model."""

    vocab_size: int
    """Number of token ids. Models of one family may pad their vocabularies to different sizes."""
    fingerprint: str
    """Digest of the text of each token id (`link.fingerprint`). The draft model must have the
    target's."""


def check_version() -> None:
    """Raise ConfigError unless the installed SGLang has the version that QSPEC supports."""
    if sglang.__version__ != SGLANG_VERSION:
        raise ConfigError(
            f"sglang is {sglang.__version__}, but this sglang-qspec supports only {SGLANG_VERSION}"
        )


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raise ConfigError unless SGLang has wrapped each target with the hook of its row."""
    for hook in hooks:
        registered = [
            (kind, getattr(function, "__wrapped__", function))
            for kind, function, _ in HookRegistry._hooks.get(hook.target, ())
        ]
        in_place = (hook.kind, hook.function) in registered
        if not in_place or hook.target not in HookRegistry._patched:
            raise ConfigError(
                f"{hook.target} is not wrapped with the hook {hook.function.__name__} of QSPEC: "
                "the plugin did not load completely, and the log above has the reason"
            )


@functools.lru_cache(maxsize=4)
def describe_model(
    path: str, tokenizer_path: str, trust_remote_code: bool, revision: str | None
) -> ModelDescription:
    """Vocabulary size and tokenizer fingerprint of a model, without its weights.

    Raises OSError or ValueError, as transformers does, if it cannot load the model.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config

    hf_config: Any = get_config(path, trust_remote_code=trust_remote_code, revision=revision)
    text_config = getattr(hf_config, "text_config", None) or hf_config
    vocabulary = vocabulary_of(tokenizer_path, trust_remote_code, revision)
    return ModelDescription(text_config.vocab_size, fingerprint(vocabulary))


def vocabulary_of(
    tokenizer_path: str, trust_remote_code: bool, revision: str | None
) -> dict[str, int]:
    """The tokens of a tokenizer, special tokens included, with their ids.

    Raises OSError or ValueError, as transformers does, if it cannot load the tokenizer.
    """
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    vocabulary: dict[str, int] = get_tokenizer(
        tokenizer_path, trust_remote_code=trust_remote_code, revision=revision
    ).get_vocab()
    return vocabulary


def tokenizer_objection(target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    """Why a draft model with another vocabulary than its target's is refused: a clause.

    It names the first token id with different texts.
    """
    token_id = first_difference(target, draft)
    ours, theirs = (
        " and ".join(sorted(repr(token) for token, each in tokens.items() if each == token_id))
        for tokens in (target, draft)
    )
    return (
        f"its tokenizer differs from the target's: token id {token_id} is {theirs or 'no token'} "
        f"there and {ours or 'no token'} in the target's tokenizer. It must give each token id the "
        "same text"
    )
