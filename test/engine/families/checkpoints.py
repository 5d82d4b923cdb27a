"""Tiny checkpoints of random weights for the model families that SGLang serves.

They have no tokenizer, so their servers run with --skip-tokenizer-init.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB, CONTEXT, WINDOW = 256, 1024, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # so that the attention of the last tokens changes the next token
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Fields of all configurations. A field that a configuration does not know has no effect."""
WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
SHARED: dict[str, Any] = {
    **MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
}
"""Groups of experts, a shared expert, and layers without experts."""
ALL_HEADS: dict[str, Any] = {"num_key_value_heads": 4}
"""As many heads of keys as of queries."""
LATENT: dict[str, Any] = {
    **ALL_HEADS,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
"""Latent keys and values (MLA)."""
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""SGLang has no other rotary positions for DeepSeek's models on a CPU."""
GPT: dict[str, Any] = {
    **ALL_HEADS,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": CONTEXT,
}
IMAGES: dict[str, Any] = {
    "image_token_id": 7,
    "video_token_id": 8,
    "vision_start_token_id": 9,
    "vision_end_token_id": 10,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 14,
    "in_chans": 3,
    "out_hidden_size": 64,
}
SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
"""Rotary positions of images and text (mRoPE)."""
DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}


@dataclass(frozen=True)
class Family:
    """One family of models."""

    model_type: str
    """Name of the configuration in transformers."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration of the language model besides SIZES."""
    vision: dict[str, Any] | None = None
    """Fields of the configuration of images besides VISION; None for a model of text."""
    served_as: str = ""
    """Name of the class in SGLang and in published checkpoints, if transformers has another."""
    transposed: bool = False
    """Whether experts in published checkpoints are [experts, in, out], but transformers saves
    [experts, out, in]."""


FAMILIES: dict[str, Family] = {
    "Llama": Family("llama"),
    "Qwen 2": Family("qwen2"),
    "Qwen 3": Family("qwen3"),
    "Qwen 3 MoE": Family("qwen3_moe", MOE),
    "Qwen 2 MoE": Family("qwen2_moe", MOE | {"shared_expert_intermediate_size": 64}),
    "DeepSeek V2": Family(
        "deepseek_v2",
        {
            **SHARED,
            **LATENT,
            "q_lora_rank": None,
            "rope_parameters": YARN,
            "moe_layer_freq": 1,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
        },
    ),
    "DeepSeek V3": Family(
        "deepseek_v3",
        {
            **SHARED,
            **LATENT,
            "rope_parameters": YARN,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "GPT-OSS": Family("gpt_oss", {**WINDOWS, **MOE, "head_dim": 32}),
    "Gemma 2": Family(
        "gemma2",
        {
            **WINDOWS,
            "head_dim": 32,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "Gemma 3": Family("gemma3_text", {**WINDOWS, "head_dim": 32, "query_pre_attn_scalar": 20}),
    "OLMo 3": Family("olmo3", WINDOWS),
    "Cohere 2": Family("cohere2", {**WINDOWS, "logit_scale": 1.0}),
    "Mistral": Family("mistral", {"sliding_window": WINDOW}),
    "Mixtral": Family("mixtral", MOE),
    "Qwen 2 VL": Family("qwen2_vl", SECTIONS, {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64}),
    "Qwen 2.5 VL": Family(
        "qwen2_5_vl", SECTIONS, {"window_size": 56, "fullatt_block_indexes": [1]}
    ),
    "Qwen 3 VL": Family("qwen3_vl", SECTIONS, DEEPSTACK),
    "Qwen 3 VL MoE": Family("qwen3_vl_moe", SECTIONS | MOE, DEEPSTACK, transposed=True),
    "EXAONE 4": Family("exaone4", {**WINDOWS, "sliding_window_pattern": "LG"}),
    "Gemma 3n": Family(
        "gemma3n_text",
        {
            **WINDOWS,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "intermediate_size": [128] * 4,
        },
    ),
    "Gemma 4": Family(
        "gemma4",
        {
            **WINDOWS,
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
        },
        {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    ),
    "Llama 4": Family(
        "llama4_text",
        {
            **MOE,
            "head_dim": 16,
            "attention_chunk_size": 256,
            "intermediate_size_mlp": 128,
            "use_qk_norm": False,  # on a CPU SGLang makes normed keys bfloat16
        },
    ),
    "GLM 4": Family("glm4", {"partial_rotary_factor": 0.5}),
    "GLM 4 MoE": Family("glm4_moe", SHARED),
    "Phi 3": Family("phi3"),
    "Granite": Family("granite"),
    "StableLM": Family("stablelm"),
    "OLMo 2": Family("olmo2"),
    "Seed OSS": Family("seed_oss", {"head_dim": 16}),
    "SmolLM 3": Family("smollm3"),
    "Starcoder 2": Family("starcoder2"),
    "GPT-2": Family("gpt2", GPT),
    "OPT": Family("opt", {**ALL_HEADS, "ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.3}),
    "Gemma": Family("gemma", {"head_dim": 16}),
    "Cohere": Family("cohere", {"logit_scale": 1.0}),
    "OLMo": Family("olmo", ALL_HEADS),
    "OLMoE": Family("olmoe", MOE | ALL_HEADS),
    "Phi": Family("phi", ALL_HEADS),
    "MiniCPM 3": Family("minicpm3", LATENT),
    "ERNIE 4.5": Family("ernie4_5", served_as="Ernie4_5_ForCausalLM"),
    "ERNIE 4.5 MoE": Family(
        "ernie4_5_moe", MOE | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    ),
    "Hunyuan": Family("hunyuan_v1_dense", {"head_dim": 16, "use_qk_norm": True}),
    "Hunyuan MoE": Family(
        "hunyuan_v1_moe",
        {
            **MOE,
            "head_dim": 16,
            "use_qk_norm": True,
            "use_mixed_mlp_moe": True,
            "moe_intermediate_size": 128,
            "moe_topk": [2] * 4,
            "num_shared_expert": [1] * 4,
        },
    ),
    "GLM 4 MoE Lite": Family("glm4_moe_lite", SHARED | LATENT),
    "Granite MoE": Family("granitemoe", MOE),
    "MiniMax M2": Family(
        "minimax_m2",
        {
            **MOE,
            "head_dim": 16,
            "rotary_dim": 8,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "Ministral 3": Family("ministral3"),
    "Mellum": Family("mellum", WINDOWS | MOE),
    "AFMoE": Family("afmoe", MOE),
    "Apertus": Family("apertus"),
    "Arcee": Family("arcee"),
    "DBRX": Family(
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 4,
            "max_seq_len": CONTEXT,
            "attn_config": {"kv_n_heads": 2},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_top_k": 2},
        },
    ),
    "GPT-J": Family("gptj", GPT | {"rotary_dim": 16}),
    "GPT BigCode": Family("gpt_bigcode", GPT),
    "Persimmon": Family("persimmon", ALL_HEADS),
    "Whisper": Family(
        "whisper",
        {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    ),
    "Falcon H1": Family("falcon_h1"),
    "Granite MoE Hybrid": Family("granitemoehybrid", MOE),
    "LFM 2": Family("lfm2"),
    "Mamba 2": Family("mamba2", {"num_heads": 8, "head_dim": 16}),
    "Qwen 3 Next": Family("qwen3_next", MOE),
    "Qwen 3.5": Family("qwen3_5_text"),
}
"""The families of docs/models.md, by the name that the page gives them."""


def write(folder: Path, name: str, *, window: int = WINDOW) -> Path:
    """Save a checkpoint of the family in float32 at `folder`; `window` is as in its config.

    Raises what transformers raises if it cannot make the model.
    """
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSpeechSeq2Seq,
    )

    family = FAMILIES[name]
    fields = SIZES | family.fields
    if "sliding_window" in fields:
        fields["sliding_window"] = window
    if family.vision is not None:
        fields = IMAGES | {"text_config": fields, "vision_config": VISION | family.vision}
    config = CONFIG_MAPPING[family.model_type](**fields)
    classes = (AutoModelForSpeechSeq2Seq, AutoModelForCausalLM, AutoModelForImageTextToText)
    torch.manual_seed(0)
    maker = next(each for each in classes if type(config) in each._model_mapping)
    model = maker.from_config(config).float()
    # Otherwise a model whose head has the weights of its embedding repeats one token.
    model.get_input_embeddings().weight.data *= 0.3
    model.save_pretrained(folder)
    if family.transposed:
        weights = load_file(folder / "model.safetensors")
        for key in [key for key in weights if ".experts." in key]:
            weights[key] = weights[key].transpose(1, 2).contiguous()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if family.served_as:
        saved = json.loads((folder / "config.json").read_text())
        saved["architectures"] = [family.served_as]
        (folder / "config.json").write_text(json.dumps(saved))
    return folder
