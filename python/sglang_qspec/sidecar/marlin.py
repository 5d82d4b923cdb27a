"""Checks, before a checkpoint is written or loaded, whether SGLang's kernels can run its layers.

On CUDA, SGLang runs weights in GPTQ layout with Marlin (compute capability 8.0 or newer). Marlin
divides a product into tiles of K inputs by N outputs. For AWQ, SGLang has another kernel where
Marlin does not fit. This module sets no limits for FP8 and unquantized weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_qspec.errors import ConfigError

MARLIN_TILES = ((128, 128), (64, 128), (128, 64))
"""Tiles (K, N) of Marlin for a few rows: `small_batch_thread_configs` in SGLang's gptq_marlin.cuh.
The tiles for many rows accept every shape that these tiles accept."""
MARLIN_GROUPS = (-1, 32, 64, 128)
"""Group sizes of Marlin: numbers of weights that share a scale. -1 means all weights of an output
channel."""
MARLIN_BITS = (4, 8)


@dataclass(frozen=True)
class MarlinLayer:
    """A linear layer as SGLang runs it: q, k and v are one layer, and so are gate and up."""

    name: str
    inputs: int
    outputs: int


def layers(config: dict[str, Any]) -> list[MarlinLayer]:
    """The linear layers of a Llama-like model, from its config.json; empty for other models."""
    config = config.get("text_config") or config
    try:
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
    except KeyError:
        return []
    head = config.get("head_dim") or hidden // heads
    shared = config.get("num_key_value_heads") or heads
    return [
        MarlinLayer("qkv_proj", hidden, (heads + 2 * shared) * head),
        MarlinLayer("o_proj", heads * head, hidden),
        MarlinLayer("gate_up_proj", hidden, 2 * intermediate),
        MarlinLayer("down_proj", intermediate, hidden),
    ]


def marlin_misfit(config: dict[str, Any], group: int) -> str | None:
    """Why Marlin cannot run a model with groups of `group` weights; None if it can."""
    if group not in MARLIN_GROUPS:
        return f"groups of {group} weights, but Marlin takes {', '.join(map(str, MARLIN_GROUPS))}"
    for layer in layers(config):
        fits = any(layer.inputs % k == layer.outputs % n == 0 for k, n in MARLIN_TILES)
        if not fits or (group > 0 and layer.inputs % group):
            return (
                f"{layer.name} with {layer.inputs} inputs and {layer.outputs} outputs, but Marlin "
                "takes multiples of 64 and 128, or of 128 and 64, and whole groups"
            )
    return None


def check_writable(model: Path, config: dict[str, Any], group: int) -> None:
    """Raise ConfigError if a GPTQ copy of `model` could not run on CUDA."""
    misfit = marlin_misfit(config, group)
    if misfit is not None:
        raise ConfigError(
            f"{model} quantized in GPTQ layout would not run on CUDA: there is {misfit}. Give the "
            "model itself as the draft model, with --speculative-draft-model-quantization fp8 "
            "(compute capability 8.9 or newer) or unquantized; or write it --for cpu"
        )


def check_checkpoint(model: Path, *, quantization: str | None = None) -> None:
    """Raise ConfigError if the checkpoint in the folder `model` cannot run on CUDA.

    `quantization` is the method that the user asks for; None for the checkpoint's own.
    """
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except FileNotFoundError:
        return
    found = config.get("quantization_config") or {}
    if found.get("quant_method") != "gptq" or quantization not in (None, "gptq_marlin", "marlin"):
        return
    bits, group = found.get("bits"), found.get("group_size", -1)
    if bits not in MARLIN_BITS or group not in MARLIN_GROUPS or not found.get("sym", True):
        return  # SGLang has another kernel for these
    misfit = marlin_misfit(config, group)
    if misfit is not None:
        raise ConfigError(
            f"the draft model {model} has {bits}-bit weights in GPTQ layout, which do not run on "
            f"CUDA: there is {misfit}. Give the unquantized model, with "
            "--speculative-draft-model-quantization fp8 or without; or run the sidecar on the CPU "
            "(--speculative-qspec-draft-device cpu)"
        )
