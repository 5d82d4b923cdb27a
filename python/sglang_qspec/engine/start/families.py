"""The kinds of models that QSPEC refuses, by the properties of their configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from sglang_qspec.errors import ConfigError

_LAYER_TYPES = ("layer_types", "layers_block_type", "block_types")
"""Fields of configurations that list the kind of each layer."""
_STATEFUL = {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent"}
"""Kinds of layers that keep a state instead of KV."""
_SCORES = ("Classification", "RewardModel", "EmbeddingModel")
"""Ends of the names of classes that compute scores or embeddings. SGLang's `is_generation` knows
only some of them."""
_MTP = ("NextN", "MTP")
"""Ends of the names of classes for the layers that predict several tokens (MTP)."""


def check(given_as: str, path: str, model_config: Any) -> None:
    """Raise ConfigError if QSPEC does not support the family of a model.

    `model_config` is SGLang's ModelConfig of the model at `path`.
    """
    names = getattr(model_config.hf_config, "architectures", None) or [
        model_config.hf_config.model_type
    ]
    for refused, kind, reason in _kinds(model_config, [str(name) for name in names]):
        if refused:
            raise ConfigError(f"{given_as} is {path}, {kind} ({names[0]}), but {reason}")


def check_checkpoint(
    given_as: str, path: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> None:
    """`check` for a model that is no server's target: reads its configuration."""
    check(given_as, path, ModelConfig(path, trust_remote_code=trust_remote_code, revision=revision))


def _kinds(model_config: Any, names: list[str]) -> Iterator[tuple[bool, str, str]]:
    """Each kind of model: whether it is this model, its name, and why QSPEC refuses it."""
    hf_config, text_config = model_config.hf_config, model_config.hf_text_config
    layers = {kind for name in _LAYER_TYPES for kind in getattr(text_config, name, None) or ()}
    yield (
        not model_config.is_generation or any(name.endswith(_SCORES) for name in names),
        "an embedding or reward model",
        "QSPEC supports only models that generate text",
    )
    yield (
        any(name.endswith(_MTP) for name in names),
        "an MTP layer",
        "QSPEC supports only whole models, EAGLE and Medusa heads: such a layer shares weights "
        "with its target, and SGLang loads it for its own algorithms",
    )
    yield (
        model_config.is_encoder_decoder or bool(getattr(hf_config, "is_encoder_decoder", False)),
        "a model with cross-attention to an encoder",
        "QSPEC supports only decoders: it verifies drafts in passes of causal self-attention",
    )
    yield (
        model_config.attention_arch == AttentionArch.SSM
        or mambaish_config(model_config) is not None
        or not _STATEFUL.isdisjoint(layers),
        "a model with recurrent layers",
        "QSPEC supports only attention: it cannot take a rejected draft token out of the state of "
        "Mamba, linear attention or a convolution",
    )
