"""The families of models that are converted from GGUF files, and the configuration of each.

A file describes its model by metadata keys `ARCHITECTURE.NAME`. Every key is either part of the
configuration or has a value that changes nothing. A file with any other key is refused, because
the converted model would not be the model in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from sglang_qspec.errors import QSpecError, shown
from sglang_qspec.tools.models.gguf_file import GGUFFile

Values = np.ndarray[Any, Any]
Change = Callable[[Values, Mapping[str, Any]], Values]
"""Turns a tensor of a file into the model's, given the configuration."""

FREQUENCIES = "rope_freqs.weight"
"""Tensor with the factors of scaled rotary positions."""
_LARGEST = 2**31 - 1
"""Largest size in a configuration."""
_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OPTIONAL = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Fields that are None if the value is 0. transformers and llama.cpp have equal defaults."""
_NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(_OPTIONAL, (0,)) | {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (1,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none",),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Values of keys that change nothing."""
_FREE = {
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "use_parallel_residual",
}
"""Keys that change nothing in a model without scaled positions. The tensors of a model say whether
its residuals are parallel."""


def _minus_one(values: Values, _config: Mapping[str, Any]) -> Values:
    return values - 1


def _transposed(values: Values, _config: Mapping[str, Any]) -> Values:
    return values.T


def _one_row(values: Values, _config: Mapping[str, Any]) -> Values:
    return values.reshape(1, -1)


def _query_halves(values: Values, config: Mapping[str, Any]) -> Values:
    return _halves(values, config["num_attention_heads"])


def _key_halves(values: Values, config: Mapping[str, Any]) -> Values:
    return _halves(values, config["num_key_value_heads"])


def _halves(values: Values, heads: int) -> Values:
    """Undo llama.cpp's order of the rows of each head, in pairs instead of halves."""
    pairs = values.reshape(heads, -1, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


_NORMS: dict[str, Change] = {r"(.*_)?norm\.weight": _minus_one}


@dataclass(frozen=True)
class Family:
    """How files of an architecture describe a model."""

    model_type: str
    """Name in transformers."""
    epsilon: str = "rms_norm_eps"
    """Field of the epsilon of the norms."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Fields by key, besides those of all families."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that no file states."""
    optional: frozenset[str] = frozenset()
    """Keys of _OPTIONAL that the family has."""
    has_head_dim: bool = False
    """Whether a field states the width of a head, which else is the hidden size over the heads."""
    has_partial_positions: bool = False
    """Whether rotary positions may turn a part of each head only."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By regular expression of the tensor's name without its layer."""

    def change(self, name: str) -> Change | None:
        """The change of a tensor; None if the model has the values of the file."""
        short = re.sub(r"^blk\.\d+\.", "", name)
        found = (each for form, each in self.changes.items() if re.fullmatch(form, short))
        return next(found, None)


_WINDOW = frozenset({"attention.sliding_window"})
FAMILIES = {
    "llama": Family(
        "llama",
        has_head_dim=True,
        changes={r"attn_q\.weight": _query_halves, r"attn_k\.weight": _key_halves},
    ),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family(
        "qwen2_moe",
        sizes=_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
        changes={r"ffn_gate_inp_shexp\.weight": _one_row},
    ),
    "qwen3": Family("qwen3", has_head_dim=True),
    "qwen3moe": Family(
        "qwen3_moe", sizes=_EXPERTS, fixed={"norm_topk_prob": True}, has_head_dim=True
    ),
    "gemma": Family("gemma", has_head_dim=True, changes=_NORMS),
    "gemma2": Family("gemma2", optional=frozenset(_OPTIONAL), has_head_dim=True, changes=_NORMS),
    "gemma3": Family(
        "gemma3_text", optional=frozenset(_OPTIONAL), has_head_dim=True, changes=_NORMS
    ),
    "phi3": Family("phi3", optional=_WINDOW, has_partial_positions=True),
    "stablelm": Family("stablelm", "layer_norm_eps", has_partial_positions=True),
    "starcoder2": Family("starcoder2", "norm_epsilon", optional=_WINDOW),
    "gpt2": Family(
        "gpt2",
        "layer_norm_epsilon",
        changes={r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight": _transposed},
    ),
    "nemotron": Family(
        "nemotron", "norm_eps", has_head_dim=True, has_partial_positions=True, changes=_NORMS
    ),
}
"""By `general.architecture`."""


def family_of(file: GGUFFile) -> Family:
    """The family of a file. Raises QSpecError if it is not one of FAMILIES."""
    kind = file.metadata.get("general.type", "model")
    parts = file.metadata.get("split.count", 1)
    name = file.metadata.get("general.architecture")
    if kind != "model":
        raise QSpecError(f"{file.path} has general.type {shown(kind)}, but must have 'model'")
    if parts not in (0, 1):
        raise QSpecError(
            f"{file.path} has split.count {shown(parts)}, but must have the whole model; join the "
            "parts with llama.cpp's llama-gguf-split --merge"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise QSpecError(
            f"{file.path} has the architecture {shown(name)}, but can be converted only with one "
            f"of {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def configuration(file: GGUFFile) -> dict[str, Any]:
    """The fields of the model's configuration in transformers.

    Raises QSpecError if a key is missing, has a value that is not allowed, or would be lost.
    """
    return _Description(file).configuration()


class _Description:
    """The metadata keys that describe the model of a file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._family = family_of(file)
        self._prefix = f"{file.metadata['general.architecture']}."
        self._left = {
            key.removeprefix(self._prefix): value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        """Keys that are not part of the configuration yet."""

    def configuration(self) -> dict[str, Any]:
        family, tensors = self._family, self._file.tensors
        found: dict[str, Any] = {
            name: self._size(key) for key, name in {**_SIZES, **family.sizes}.items()
        }
        kind = "rms_" if family.epsilon == "rms_norm_eps" else ""
        found[family.epsilon] = self._positive(f"attention.layer_norm_{kind}epsilon")
        found |= self._heads(found["hidden_size"], found["num_attention_heads"])
        found |= self._optional(found["max_position_embeddings"])
        found |= family.fixed
        found["tie_word_embeddings"] = "output.weight" not in tensors
        if family.model_type == "stablelm":
            found["use_qkv_bias"] = "blk.0.attn_q.bias" in tensors
            found["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
        found["vocab_size"] = self._vocabulary()
        self._check_layers(found["num_hidden_layers"])
        if found.get("num_experts_per_tok", 0) > found.get("num_experts", 0):
            self._refuse("expert_used_count", found["num_experts_per_tok"], "at most expert_count")
        self._check_left()
        return found

    def _heads(self, hidden: int, heads: int) -> dict[str, Any]:
        """Number and width of the heads, and their rotary positions."""
        family = self._family
        if hidden % heads and not (family.has_head_dim and "attention.key_length" in self._left):
            self._refuse("attention.head_count", heads, f"a divisor of embedding_length {hidden}")
        width = self._size("attention.key_length", hidden // heads)
        if width % 2 or not (family.has_head_dim or width * heads == hidden):
            allowed = "an even number" if family.has_head_dim else str(hidden // heads)
            self._refuse("attention.key_length", width, allowed)
        self._must_be("attention.value_length", width)
        shared = self._size("attention.head_count_kv", heads)
        if heads % shared:
            self._refuse("attention.head_count_kv", shared, f"a divisor of head_count {heads}")
        if family.model_type == "gpt2":
            if shared != heads:
                self._refuse("attention.head_count_kv", shared, str(heads))
            return {}
        found: dict[str, Any] = {"head_dim": width} if family.has_head_dim else {}
        return found | {
            "num_key_value_heads": shared,
            "rope_parameters": self._positions(width),
        }

    def _positions(self, width: int) -> dict[str, Any]:
        """The rotary positions of heads of a width."""
        whole = {"rope_type": "default", "rope_theta": self._positive("rope.freq_base", 10000.0)}
        if self._family.model_type == "gemma3_text":
            local = self._positive("rope.freq_base_swa", 10000.0)
            self._must_be("rope.dimension_count", width)
            return {
                "full_attention": whole,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }
        if not self._family.has_partial_positions:
            self._must_be("rope.dimension_count", width)
            return whole
        turned = self._size("rope.dimension_count", width)
        if turned % 2 or turned > width:
            self._refuse("rope.dimension_count", turned, f"an even number up to {width}")
        return whole | {"partial_rotary_factor": turned / width}

    def _optional(self, context: int) -> dict[str, Any]:
        """Sliding window and logit caps of a family that has them."""
        found: dict[str, Any] = {}
        for key in self._family.optional & self._left.keys():
            if self._left[key] == 0:
                found[_OPTIONAL[key]] = None
                del self._left[key]
            else:
                read = self._size if key in _WINDOW else self._positive
                found[_OPTIONAL[key]] = read(key)
        window = self._left.get("attention.sliding_window")
        if isinstance(window, int) and window >= context:  # as wide as every text
            del self._left["attention.sliding_window"]
        return found

    def _vocabulary(self) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise QSpecError(f"{self._file.path} has no tensor token_embd.weight")
        self._must_be("vocab_size", embedding.shape[0])
        return embedding.shape[0]

    def _check_layers(self, layers: int) -> None:
        matches = (re.match(r"blk\.(\d{1,9})\.", name) for name in self._file.tensors)
        held = max((int(match[1]) + 1 for match in matches if match), default=0)
        if layers != held:
            self._refuse("block_count", layers, f"{held}, as the tensors have so many layers")

    def _check_left(self) -> None:
        """Raise QSpecError if a key is left that changes the model."""
        norms = {"expert_weights_norm": (self._family.fixed.get("norm_topk_prob", False),)}
        for key, value in self._left.items():
            allowed = (_NEUTRAL | norms).get(key, ())
            if key in _FREE or value in allowed:
                continue
            what = f"only {shown(allowed[0])} can be converted" if allowed else "it would be lost"
            raise QSpecError(
                f"{self._file.path} has {self._prefix}{key} {shown(value)}, but {what}; take the "
                "model's original checkpoint"
            )

    def _must_be(self, key: str, expected: int) -> None:
        """Take a key, which the file need not have."""
        if (value := self._size(key, expected)) != expected:
            self._refuse(key, value, str(expected))

    def _size(self, key: str, default: int | None = None) -> int:
        """Take a whole number, or a list with the same number for each layer."""
        value = self._left.pop(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            self._refuse(key, value, f"a whole number from 1 to {_LARGEST}")
        return value

    def _positive(self, key: str, default: float | None = None) -> float:
        """Take a number above 0."""
        value = self._left.pop(key, default)
        if not isinstance(value, float) or not 0 < value < math.inf:
            self._refuse(key, value, "a number above 0")
        return value

    def _refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        name = f"{self._file.path} has {self._prefix}{key}"
        raise QSpecError(f"{name} {shown(value)}, but must have {allowed}")
