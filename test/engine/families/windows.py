"""Tiny checkpoints of random weights whose attention has windows, caps, sinks or latent keys.

They have no tokenizer, so their servers run with --skip-tokenizer-init.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCAB, CONTEXT = 256, 1024
SIZES = {
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
SLIDING = ["sliding_attention", "full_attention"] * 2


def _cohere2(window: int) -> Any:
    from transformers import Cohere2Config

    return Cohere2Config(**SIZES, sliding_window=window, layer_types=SLIDING, logit_scale=1.0)


def _gemma2(window: int) -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        **SIZES,
        head_dim=32,
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=20,
        sliding_window=window,
        layer_types=SLIDING,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    )


def _gemma3(window: int) -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **SIZES, head_dim=32, query_pre_attn_scalar=20, sliding_window=window, layer_types=SLIDING
    )


def _olmo3(window: int) -> Any:
    from transformers import Olmo3Config

    return Olmo3Config(**SIZES, sliding_window=window, layer_types=SLIDING)


def _mistral(window: int) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**SIZES, sliding_window=window)


def _gpt_oss(window: int) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **SIZES,
        head_dim=32,
        sliding_window=window,
        layer_types=SLIDING,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _deepseek(version: str) -> Any:
    import transformers

    config = getattr(transformers, f"Deepseek{version}Config")
    return config(
        **SIZES | {"num_key_value_heads": 4},
        moe_intermediate_size=64,
        first_k_dense_replace=2,
        moe_layer_freq=1,
        topk_method="noaux_tc" if version == "V3" else "group_limited_greedy",
        scoring_func="sigmoid" if version == "V3" else "softmax",
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=48 if version == "V3" else None,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        # SGLang has no other rotary positions for these models on a CPU.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": CONTEXT // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


FAMILIES: dict[str, Callable[[int], Any]] = {
    "cohere2": _cohere2,
    "deepseek_v2": lambda _: _deepseek("V2"),
    "deepseek_v3": lambda _: _deepseek("V3"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "mistral": _mistral,
    "olmo3": _olmo3,
}


def write(folder: Path, family: str, *, window: int) -> Path:
    """Save a checkpoint of the `family` in float32 at `folder`; `window` is as in its config."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](window)).float()
    # Otherwise a model whose head has the weights of its embedding repeats one token.
    model.get_input_embeddings().weight.data *= 0.3
    model.save_pretrained(folder)
    return folder
