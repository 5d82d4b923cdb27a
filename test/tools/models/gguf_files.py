"""Writes small GGUF files of random models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quantize,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

PADDING = [f"[PAD{token_id}]" for token_id in range(259, 272)]
BPE_TOKENS = [*bytes_to_unicode().values(), "12", "Ġa", "<|end|>", *PADDING]
SPM_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "▁a", "ab", "▁ab"]

BPE: dict[str, Any] = {
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": BPE_TOKENS,
    "token_type": [TokenType.NORMAL] * 258 + [TokenType.CONTROL] + [TokenType.UNUSED] * 13,
    "merges": ["1 2", "Ġ a"],
    "eos_token_id": 258,
    "bos_token_id": 258,
}
"""A byte-level vocabulary with two merges, a control token and ids without a token."""
SPM: dict[str, Any] = {
    "model": "llama",
    "tokens": SPM_TOKENS,
    "scores": [-float(place) for place in range(10)],
    "token_type": [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.NORMAL] * 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "unknown_token_id": 3,
    "padding_token_id": 0,
    "add_bos_token": True,
}
"""A sentence-piece vocabulary of two letters."""


def write_gguf(
    file: Path,
    model: Any,
    architecture: str,
    tokenizer: Mapping[str, Any],
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    quantized: str = "F32",
) -> Path:
    """Write `model`, with matrices in the type `quantized`.

    `fields` of the architecture and `tensors` come in addition; a tensor replaces the model's.
    """
    config = model.config
    writer = GGUFWriter(file, architecture)
    described = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        **_described(config),
        **(fields or {}),
    }
    for name, value in described.items():
        _add(writer, f"{architecture}.{name}", value)
    for name, value in tokenizer.items():
        _add(writer, f"tokenizer.ggml.{name}", value)
    for name, tensor in (_tensors(model, architecture) | dict(tensors or {})).items():
        kind = GGMLQuantizationType[quantized if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _described(config: Any) -> dict[str, Any]:
    """The fields that not all families have."""
    names = {
        "feed_forward_length": ("intermediate_size",),
        "attention.head_count_kv": ("num_key_value_heads",),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
        "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
        "expert_count": ("num_experts",),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    }
    found = {
        name: getattr(config, field)
        for name, fields in names.items()
        for field in fields
        if hasattr(config, field)
    }
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return found | ({"rope.freq_base": rope["rope_theta"]} if rope else {})


def _tensors(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """The weights by their names in GGUF files."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weight = weight.float().contiguous()
        if architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            weight = weight + 1.0
        if architecture == "gpt2" and name.split(".")[-2].startswith("c_"):
            weight = weight.T.contiguous() if weight.ndim == 2 else weight
        if ".experts." in name:
            found |= _experts(names, name, weight)
            continue
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            pairs = weight.unflatten(0, (-1, 2, model.config.head_dim // 2))
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        found[names.get_name(name, (".weight", ".bias"))] = weight
    return found


def _experts(names: Any, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of all experts of a layer, which transformers joins further than a file."""
    layer, _, kind = name.rpartition(".experts.")
    block = names.get_name(f"{layer}.gate").removesuffix("_gate_inp")
    if kind == "down_proj":
        return {f"{block}_down_exps.weight": weight}
    gate, up = (half.contiguous() for half in weight.chunk(2, 1))
    return {f"{block}_gate_exps.weight": gate, f"{block}_up_exps.weight": up}


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(name, value)
