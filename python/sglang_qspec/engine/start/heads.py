"""Checks that a head fits its target, before weights load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoConfig, PretrainedConfig

from sglang_qspec import config
from sglang_qspec.config import QSpecConfig
from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import HeadConfig, HeadKind, is_head_folder, read

CAPTURES = "set_eagle3_layers_to_capture"
"""The method of SGLang's models that can keep the outputs of layers for heads."""


def check_alone(args: Any, settings: QSpecConfig, flag: str, path: str) -> None:
    """Check a head that has no draft model beside it; `flag` names its folder `path`."""
    check(args, settings, flag, Path(path).expanduser())
    if settings.prefill_drafts == "on":
        raise ConfigError(
            f"{config.flag('prefill_drafts')} is 'on' and {flag} is the head {path}: a head drafts "
            "for running requests only"
        )


def check(args: Any, settings: QSpecConfig, flag: str, folder: Path) -> None:
    """Check that the head that `flag` names fits its target, and that the settings can use it."""
    given = f"{flag} is the head {folder}"
    if not is_head_folder(folder):
        raise ConfigError(f"{flag} is {str(folder)!r}, but must be the folder of a head")
    if settings.mode == "queue":
        raise ConfigError(
            f"{config.flag('mode')} is 'queue' and {given}: a head drafts for running requests only"
        )
    target = Path(args.model_path).expanduser()
    try:
        content = msgspec.json.decode((target / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        raise ConfigError(
            f"{given}, so --model-path must be a folder with a config.json, but is "
            f"{args.model_path!r}"
        ) from None
    try:
        head = read(folder)
        head.check_target(content)
    except ConfigError as error:
        raise ConfigError(f"{given}, but {error}") from None
    names = content.get("architectures") or [""]
    if head.kind is HeadKind.MEDUSA:
        _let_transformers_read(given, head)
    from sglang.srt.models.registry import ModelRegistry  # it imports all models, for seconds

    captures = hasattr(ModelRegistry.resolve_model_cls(names)[0], CAPTURES)
    if head.kind is HeadKind.EAGLE3 and not captures:
        raise ConfigError(f"{given}, but SGLang keeps no states of a {names[0]} for heads")


def _let_transformers_read(given: str, head: HeadConfig) -> None:
    """Let transformers read the `config.json` of Medusa heads, because SGLang reads it with that.

    Raises ConfigError if it names no type.
    """
    kind = _MedusaConfig.model_type
    if (found := head.fields.get("model_type")) != kind:
        raise ConfigError(
            f"{given}, but the model_type of its config.json is {found!r} and must be {kind!r}"
        )
    AutoConfig.register(kind, _MedusaConfig, exist_ok=True)


class _MedusaConfig(PretrainedConfig):
    """The configuration of Medusa heads; only its fields are of interest."""

    model_type = "medusa"
