"""Checkpoints without weights, in the shapes of well-known models, for `--load-format dummy`.

They serve for measuring times only, because random weights give no useful answers. The tokenizer is
the demo model's; its vocabulary is smaller than the vocabulary of the shapes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sglang_qspec.tools.models import demo_models

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 49152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
"""Shapes of Llama 3.1 8B and Llama 3.2 1B, and one for a CPU."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write(folder: Path, shape: str) -> Path:
    """Write the configuration and the tokenizer to `folder`/`shape`; returns this folder."""
    made = folder / shape
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps({**_LLAMA, **SHAPES[shape]}, indent=1))
    target = demo_models().target
    for name in TOKENIZER:
        shutil.copyfile(target / name, made / name)
    return made
