"""The configurations of new heads, for a target that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import HeadConfig, HeadKind, default_layers, rises


def medusa_for_target(target: Mapping[str, Any], heads: int) -> HeadConfig:
    """The configuration of new Medusa heads for a target with this `config.json`.

    Raises ConfigError if it does not tell the target's sizes.
    """
    width, ids = _sizes(target)
    fields = {
        "architectures": [HeadKind.MEDUSA.value],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": ids,
        "num_heads": heads,
        "num_hidden_layers": 1,
        "medusa_num_heads": heads,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
    }
    return HeadConfig(HeadKind.MEDUSA, width, width, ids, ids, None, 1, fields, heads, 1)


def hydra_for_target(target: Mapping[str, Any], draft_vocab_size: int) -> HeadConfig:
    """The configuration of a new Hydra head for a target with this `config.json`.

    Raises ConfigError if it does not tell the target's sizes.
    """
    width, ids = _sizes(target)
    fields = {
        "architectures": [HeadKind.HYDRA.value],
        "model_type": "hydra",
        "hidden_size": width,
        "vocab_size": ids,
        "draft_vocab_size": draft_vocab_size,
        "intermediate_size": 2 * width,
    }
    return HeadConfig(
        HeadKind.HYDRA, width, width, ids, draft_vocab_size, None, 1, fields, inner_size=2 * width
    )


def eagle2_for_target(target: Mapping[str, Any]) -> HeadConfig:
    """The configuration of a new EAGLE-2 head for a target with this `config.json`.

    Raises ConfigError if the target has no decoder layers as Llama has them.
    """
    fields = _decoder_fields(target) | {"architectures": [HeadKind.EAGLE2.value]}
    width, ids = target["hidden_size"], target["vocab_size"]
    return HeadConfig(HeadKind.EAGLE2, width, width, ids, ids, None, 1, fields)


def for_target(
    target: Mapping[str, Any], draft_vocab_size: int, layers: Sequence[int] | None = None
) -> HeadConfig:
    """The configuration of a new EAGLE-3 head for a target with this `config.json`.

    Raises ConfigError as `eagle2_for_target`, and if the target does not have the `layers`.
    """
    fields = _decoder_fields(target)
    number = int(target["num_hidden_layers"])
    chosen = default_layers(number) if layers is None else tuple(layers)
    if not rises(chosen) or max(chosen) > number - 2:
        raise ConfigError(
            f"layers is {list(chosen)}, but must be different layers from 0 to {number - 2} in "
            f"rising order, because the target has {number} layers and a head cannot read the last "
            "one"
        )
    fields |= {
        "architectures": [HeadKind.EAGLE3.value],
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(chosen),
            "use_aux_hidden_state": True,
        },
    }
    return HeadConfig(
        kind=HeadKind.EAGLE3,
        hidden_size=target["hidden_size"],
        target_hidden_size=target["hidden_size"],
        vocab_size=target["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        layers=chosen,
        states=len(chosen),
        fields=fields,
    )


def _sizes(target: Mapping[str, Any]) -> tuple[int, int]:
    """Width and number of token ids of a target. Raises ConfigError."""
    _need(target, "hidden_size", "vocab_size")
    return target["hidden_size"], target["vocab_size"]


def _need(target: Mapping[str, Any], *names: str) -> None:
    """Raise ConfigError unless a target's `config.json` has these whole numbers."""
    for name in names:
        if not isinstance(target.get(name), int):
            raise ConfigError(f"the target's config.json has no {name}, which a head needs")


def _decoder_fields(target: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a head's `config.json` that describe its decoder layer."""
    _need(
        target,
        *("hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_hidden_layers", "vocab_size"),
    )
    kept = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
        *("max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id"),
    )
    fields = {name: target[name] for name in kept if target.get(name) is not None}
    return fields | {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
