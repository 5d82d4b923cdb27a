"""Checks SGLang's version, the installed hooks and the two models before weights load."""

from __future__ import annotations

import copy
import functools
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_qspec import values
from sglang_qspec.engine import touched
from sglang_qspec.engine.hooks import Hook
from sglang_qspec.errors import ConfigError
from sglang_qspec.link.fingerprint import fingerprint, first_difference

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True)
class ModelDescription:
    """The token ids and the architecture of a model."""

    vocab_size: int
    """Number of token ids. Models of one family may pad their vocabularies to different sizes."""
    fingerprint: str
    """Digest of the text of each token id (`link.fingerprint`). The draft model must have the
    target's."""
    architecture: str
    """Name of the model's class in its config.json, or the family if the file names no class."""
    tokenizer: tuple[str, bool, str | None]
    """Arguments of `load_tokenizer` for the model's tokenizer."""


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


def used_names(hooks: Iterable[Hook]) -> tuple[str, ...]:
    """The targets of `hooks`, and all other names of SGLang that QSPEC uses."""
    return (*(hook.target for hook in hooks), *touched.CALLED)


def missing_names(names: Iterable[str]) -> list[str]:
    """Those of the dotted `names` that the installed packages lack."""
    missing = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing


@functools.lru_cache(maxsize=4)
def describe_model(
    path: str, tokenizer_path: str, trust_remote_code: bool, revision: str | None
) -> ModelDescription:
    """Vocabulary size and tokenizer fingerprint of a model, without its weights.

    Raises OSError or ValueError, as transformers does, if it cannot load the model.
    """
    from sglang.srt.utils.hf_transformers.common import get_hf_text_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    hf_config: Any = get_config(path, trust_remote_code=trust_remote_code, revision=revision)
    tokenizer = tokenizer_path, trust_remote_code, revision
    names = getattr(hf_config, "architectures", None) or [hf_config.model_type]
    digest = fingerprint(load_tokenizer(*tokenizer).get_vocab())
    vocab_size = get_hf_text_config(copy.deepcopy(hf_config)).vocab_size
    return ModelDescription(vocab_size, digest, str(names[0]), tokenizer)


def describe_given(
    flag: str, path: str, trust_remote_code: bool, revision: str | None
) -> ModelDescription:
    """`describe_model` for a model that the user gave with `flag`; raises ConfigError."""
    if values.is_local(path) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"{flag} is {path!r}, but there is no such folder")
    try:
        return describe_model(path, path, trust_remote_code, revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{flag} is {path!r}, but no model can be loaded from there: "
            f"{str(error).splitlines()[0]}"
        ) from error


def load_tokenizer(tokenizer_path: str, trust_remote_code: bool, revision: str | None) -> Any:
    """A tokenizer of transformers, as SGLang loads it.

    Raises OSError or ValueError, as transformers does, if it cannot load the tokenizer.
    """
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code, revision=revision)


def tokenizer_objection(target: ModelDescription, draft: ModelDescription) -> str:
    """Why a draft model with another fingerprint than its target's is refused: a clause.

    It names the first token id with different texts.
    """
    ours, theirs = (load_tokenizer(*model.tokenizer).get_vocab() for model in (target, draft))
    token_id = first_difference(ours, theirs)
    here, there = (
        " and ".join(sorted(repr(token) for token, each in tokens.items() if each == token_id))
        for tokens in (ours, theirs)
    )
    return (
        f"its tokenizer differs from the target's: token id {token_id} is {there or 'no token'} "
        f"there and {here or 'no token'} in the target's tokenizer. It must give each token id the "
        "same text"
    )
