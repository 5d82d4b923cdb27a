"""The model of a GGUF file gives the same logits as the model that the file was written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglang_qspec.tools.models import convert
from sglang_qspec.tools.models.gguf_families import FAMILIES
from test.tools.models.gguf_files import BPE, write_gguf

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "bos_token_id": 258,
    "eos_token_id": 258,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WIDE = {"head_dim": 16}
WIDE_FIELDS = {"attention.key_length": 16, "attention.value_length": 16}
GEMMA = {**WIDE, "query_pre_attn_scalar": 16}


def rotary(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {**WIDE, **rotary()}, WIDE_FIELDS),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {"rope.dimension_count": 8}),
    "qwen2moe": (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": False},
        {},
    ),
    "qwen3": ("Qwen3", WIDE, WIDE_FIELDS),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, **WIDE, "norm_topk_prob": True}, WIDE_FIELDS),
    "gemma": ("Gemma", WIDE, WIDE_FIELDS),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "sliding_window": 4, "attn_logit_softcapping": 7.0},
        {
            **WIDE_FIELDS,
            "attention.sliding_window": 4,
            "attn_logit_softcapping": 7.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "sliding_window": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        {**WIDE_FIELDS, "attention.sliding_window": 4, "rope.freq_base_swa": 300.0},
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": 4, **rotary(partial_rotary_factor=0.5)},
        {"rope.dimension_count": 4, "attention.sliding_window": 4},
    ),
    "stablelm": (
        "StableLm",
        {"use_qkv_bias": True, **rotary(partial_rotary_factor=0.5)},
        {"rope.dimension_count": 4},
    ),
    "starcoder2": ("Starcoder2", rotary(), {}),
    "gpt2": (
        "GPT2",
        {"tie_word_embeddings": True},
        {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 128},
    ),
    "nemotron": ("Nemotron", rotary(partial_rotary_factor=0.5), {"rope.dimension_count": 4}),
}


def model_of(architecture: str) -> Any:
    name, given, _ = CASES[architecture]
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    shape = {**SHAPE, **given}
    if name == "GPT2":
        del shape["num_key_value_heads"], shape["intermediate_size"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**shape))
    for weight_name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0 if "norm.weight" in weight_name else 0.0, 0.2)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[5, 4, 9, 6, 7, 5, 5, 8, 200, 3, 1, 1]])).logits


def test_every_family_has_a_case() -> None:
    assert CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("architecture", CASES)
def test_a_file_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    model = model_of(architecture)
    fields = CASES[architecture][2]
    file = write_gguf(tmp_path / "model.gguf", model, architecture, BPE, fields)
    folder = convert(file, tmp_path / "made", dtype="float32")
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(made), logits(model))
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        type(model).__name__
    ]
