"""Writes LoRA adapters of random weights in the format of PEFT."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, base: Path, targets: Sequence[str], *, rank: int, scale: float, seed: int
) -> Path:
    """Write an adapter for the Llama model at `base` to `folder`.

    `targets` are of LINEAR, `lm_head` and `embed_tokens`. The change of a layer's output is about
    `scale` times as large as its input.
    """
    config = json.loads((base / "config.json").read_text())
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    weights = {}
    for name, inputs, outputs in _layers(config, targets):
        weights[f"{name}.lora_A.weight"] = draw(rank, inputs) / inputs**0.5
        weights[f"{name}.lora_B.weight"] = draw(outputs, rank) * scale
    if "embed_tokens" in targets:
        name = "base_model.model.model.embed_tokens"
        weights[f"{name}.lora_embedding_A"] = draw(rank, config["vocab_size"])
        weights[f"{name}.lora_embedding_B"] = draw(config["hidden_size"], rank) * scale / 30
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    shown = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(shown))
    return folder


def _layers(config: dict[str, Any], targets: Sequence[str]) -> list[tuple[str, int, int]]:
    """Name, number of inputs and number of outputs of each linear layer among `targets`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = head * config["num_attention_heads"]
    kv_heads = head * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    found = [
        (f"base_model.model.model.layers.{layer}.{name}", *shape)
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
        if name.split(".")[1] in targets
    ]
    if "lm_head" in targets:
        found.append(("base_model.model.lm_head", hidden, config["vocab_size"]))
    return found
