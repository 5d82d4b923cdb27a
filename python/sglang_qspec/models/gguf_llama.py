"""Converts a Llama model in a GGUF file to a Hugging Face checkpoint.

The `gguf` package dequantizes the weights to float32, and this module rounds them to bfloat16.
Tensor names and rotary order are converted by the inverse of llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from sglang_qspec.errors import QSpecError
from sglang_qspec.models.gguf_tokenizer import field_value, tokenizer, tokenizer_config

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(reader: GGUFReader, folder: Path) -> None:
    """Write the model, its configuration, tokenizer and chat template into an empty folder.

    Raises QSpecError if the file has another architecture, or an unknown tensor or tokenizer.
    """
    config = model_config(reader)
    weights = dict(tensors(reader, config))
    if "lm_head.weight" not in weights:
        config["tie_word_embeddings"] = True
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", config)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", tokens)
    tokenizer(reader).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", tokenizer_config(reader))


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the content of `config.json`."""
    architecture = field_value(reader, "general.architecture")
    if architecture != "llama":
        raise QSpecError(f"the GGUF file's architecture is {architecture!r}, but must be 'llama'")
    heads = field_value(reader, "llama.attention.head_count")
    hidden = field_value(reader, "llama.embedding_length")
    rope_theta = field_value(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field_value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field_value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field_value(reader, "tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": hidden**-0.5,
        "intermediate_size": field_value(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field_value(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": field_value(reader, "llama.block_count"),
        "num_key_value_heads": field_value(reader, "llama.attention.head_count_kv"),
        # The file stores it in float32; the shortest decimal is the original number.
        "rms_norm_eps": _shortest(field_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": field_value(reader, "llama.vocab_size"),
    }


def tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face name and bfloat16 tensor of each weight; matrices are [out, in]."""
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = _halves_apart(weight, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            weight = _halves_apart(weight, config["num_key_value_heads"])
        yield _hugging_face_name(tensor.name), torch.tensor(weight, dtype=torch.bfloat16)


def _hugging_face_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _IN_BLOCK:
        raise QSpecError(f"the GGUF file has the tensor {name!r}, which no Llama model has")
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"


def _halves_apart(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows: llama.cpp's rotary pairs are (2i, 2i+1), Hugging Face's (i, i + head_dim/2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
