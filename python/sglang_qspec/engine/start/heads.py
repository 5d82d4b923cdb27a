"""Checks that a head fits its target, before weights load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoConfig, PretrainedConfig

from sglang_qspec import config
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.placement.devices import kind_of
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
    head, content = _read(given, folder, "--model-path", args.model_path, "target")
    names = content.get("architectures") or [""]
    if head.kind in _CONFIGS:
        _let_transformers_read(given, head, _CONFIGS[head.kind])
    from sglang.srt.models.registry import ModelRegistry  # it imports all models, for seconds

    captures = hasattr(ModelRegistry.resolve_model_cls(names)[0], CAPTURES)
    if head.kind is HeadKind.EAGLE3 and not captures:
        raise ConfigError(f"{given}, but SGLang keeps no states of a {names[0]} for heads")


def check_of_draft_model(args: Any, settings: QSpecConfig) -> None:
    """Check that the draft model's own head fits it, and that the server's sidecar can use it."""
    path, flag = settings.draft_model_head, "--speculative-draft-model-path"
    given = f"{config.flag('draft_model_head')} is {path!r}"
    draft_model = args.speculative_draft_model_path
    if draft_model is None or is_head_folder(Path(draft_model).expanduser()):
        raise ConfigError(f"{given}, but {flag} is {draft_model!r}: it must be a draft model")
    if kind_of(args) != "cpu" and settings.draft_device != "cpu":
        raise ConfigError(
            f"{given}, but a draft model has a head on a CPU alone so far "
            f"({config.flag('draft_device')} cpu)"
        )
    folder = Path(path).expanduser()
    if not is_head_folder(folder):
        raise ConfigError(f"{given}, but must be the folder of a head")
    head, _ = _read(given, folder, flag, draft_model, "draft model")
    if head.kind is not HeadKind.HYDRA:
        raise ConfigError(
            f"{given}, which is a {head.kind.value}, but must be a Hydra head (qspec models "
            "train-head --kind hydra)"
        )


def _read(
    given: str, folder: Path, flag: str, path: str, model: str
) -> tuple[HeadConfig, dict[str, Any]]:
    """The configuration of a head, and that of the `model` that `flag` names.

    Raises ConfigError if one of them cannot be read, or the head does not fit the model.
    """
    try:
        content = msgspec.json.decode((Path(path).expanduser() / "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        raise ConfigError(
            f"{given}, so {flag} must be a folder with a config.json, but is {path!r}"
        ) from None
    try:
        head = read(folder)
        head.check_target(content, model)
    except ConfigError as error:
        raise ConfigError(f"{given}, but {error}") from None
    return head, content


def _let_transformers_read(given: str, head: HeadConfig, read_as: type[PretrainedConfig]) -> None:
    """Let transformers read a head's `config.json`, because SGLang reads it with that.

    Raises ConfigError if it does not name the type of `read_as`.
    """
    kind = read_as.model_type
    if (found := head.fields.get("model_type")) != kind:
        raise ConfigError(
            f"{given}, but the model_type of its config.json is {found!r} and must be {kind!r}"
        )
    AutoConfig.register(kind, read_as, exist_ok=True)


class _MedusaConfig(PretrainedConfig):
    """The configuration of Medusa heads; only its fields are of interest."""

    model_type = "medusa"


class _HydraConfig(PretrainedConfig):
    """The configuration of a Hydra head; only its fields are of interest."""

    model_type = "hydra"


_CONFIGS = {HeadKind.MEDUSA: _MedusaConfig, HeadKind.HYDRA: _HydraConfig}
"""The class that reads a head's `config.json`, for the kinds that transformers does not know."""
