"""Describes a target and its draft model, before weights load, to see whether they fit."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.utils.hf_transformers.common import get_hf_text_config
from sglang.srt.utils.hf_transformers_utils import get_config, get_tokenizer

from sglang_qspec import values
from sglang_qspec.errors import ConfigError
from sglang_qspec.link.fingerprint import fingerprint, first_difference


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


@functools.lru_cache(maxsize=4)
def describe_model(
    path: str, tokenizer_path: str, trust_remote_code: bool, revision: str | None
) -> ModelDescription:
    """Vocabulary size and tokenizer fingerprint of a model, without its weights.

    Raises OSError or ValueError, as transformers does, if it cannot load the model.
    """
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
