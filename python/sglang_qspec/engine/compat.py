"""Is SGLang what it is taken for, and do the two models fit? Asked before anything is loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_qspec.engine.touched import HOOKED
from sglang_qspec.errors import ConfigError
from sglang_qspec.link.fingerprint import fingerprint

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True)
class ModelDescription:
    """What two models must have in common for one to draft for the other."""

    vocab_size: int
    fingerprint: str


def check_version() -> None:
    """Raise ConfigError unless the installed SGLang is the one QSPEC is written for."""
    if sglang.__version__ != SGLANG_VERSION:
        raise ConfigError(
            f"sglang is {sglang.__version__}, but this sglang-qspec works only with "
            f"{SGLANG_VERSION}"
        )


def check_hooks(names: tuple[str, ...] = HOOKED) -> None:
    """Raise ConfigError unless each of `names` is wrapped by this plugin."""
    for name in names:
        hooks = HookRegistry._hooks.get(name, ())
        ours = any(hook.__module__.startswith("sglang_qspec.") for _, hook, _ in hooks)
        if not ours or name not in HookRegistry._patched:
            raise ConfigError(
                f"{name} is not wrapped by QSPEC: the plugin did not load completely; "
                "the log above tells why"
            )


@functools.lru_cache(maxsize=4)
def describe_model(
    path: str, tokenizer_path: str, trust_remote_code: bool, revision: str | None
) -> ModelDescription:
    """Vocabulary size and tokenizer fingerprint of a model, without its weights.

    Raises OSError or ValueError, as transformers does, if there is no such model.
    """
    from sglang.srt.utils.hf_transformers_utils import get_config, get_tokenizer

    hf_config: Any = get_config(path, trust_remote_code=trust_remote_code, revision=revision)
    text_config = getattr(hf_config, "text_config", None) or hf_config
    tokenizer = get_tokenizer(
        tokenizer_path, trust_remote_code=trust_remote_code, tokenizer_revision=revision
    )
    return ModelDescription(text_config.vocab_size, fingerprint(tokenizer.get_vocab()))
