"""The arithmetic of docs/deployment.md: memory and pass times of a node.

Nothing here is measured. GPU_BYTES, BANDWIDTH and the shapes of the models are published figures,
the other constants guesses; the page states them all.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU_BYTES = 80e9
BANDWIDTH = 3.35e12
"""Bytes per second of an H100 SXM."""
EFFICIENCY = 0.7
STATIC = 0.88
"""Part of a GPU's memory for weights and KV."""
HOST_SECONDS = 1e-3
REDUCE_SECONDS = 10e-6
CONTEXT = 1000


@dataclass(frozen=True)
class Model:
    """A decoder in numbers. `value_bytes` is the size of a weight; KV is in 16 bits."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    value_bytes: float
    experts: int = 0
    chosen: int = 0
    """Experts of a layer that a token uses."""
    expert_parameters: float = 0.0
    """Parameters of one expert."""

    def kv_bytes(self, ranks: int) -> float:
        """Bytes of a token's KV in all ranks; a rank has at least one head."""
        return 2 * self.layers * max(self.kv_heads, ranks) * self.head_dim * 2.0

    def weight_bytes(self) -> float:
        return self.parameters * self.value_bytes

    def read_bytes(self, rows: int) -> float:
        """Bytes of weights that a pass over `rows` tokens reads, with experts chosen at random."""
        own = self.layers * self.experts * self.expert_parameters
        if not own:
            return self.weight_bytes()
        share = 1 - (1 - self.chosen / self.experts) ** rows
        return (self.parameters - own + own * share) * self.value_bytes


MODELS = {
    "8B, bfloat16": Model(8.03e9, 32, 8, 128, 2),
    "70B, bfloat16": Model(70.6e9, 80, 8, 128, 2),
    "70B, FP8": Model(70.6e9, 80, 8, 128, 1),
    "235B MoE, bfloat16": Model(235.1e9, 94, 4, 128, 2, 128, 8, 3 * 4096 * 1536),
    "235B MoE, FP8": Model(235.1e9, 94, 4, 128, 1, 128, 8, 3 * 4096 * 1536),
}
DRAFTERS = {
    "8B": Model(1.24e9, 16, 8, 64, 2),
    "70B": Model(8.03e9, 32, 8, 128, 0.71),
    "235B MoE": Model(1.72e9, 28, 8, 128, 2),
}
"""Llama 3.2 1B in bfloat16, Llama 3.1 8B in 4 bits (5.7 GB), Qwen3 1.7B in bfloat16."""


def drafter_of(target: str) -> Model:
    return DRAFTERS[target.split(",")[0]]


def kv_tokens(model: Model, ranks: int) -> float:
    """KV slots of a server; negative if the weights do not fit."""
    free = ranks * GPU_BYTES * STATIC - model.weight_bytes()
    return free / model.kv_bytes(ranks)


def pass_ms(model: Model, ranks: int, requests: int, width: int) -> float:
    """Milliseconds of a pass over `width` tokens for each of `requests` requests."""
    read = model.read_bytes(requests * width) + requests * CONTEXT * model.kv_bytes(ranks)
    seconds = read / (ranks * BANDWIDTH * EFFICIENCY) + HOST_SECONDS
    if ranks > 1:
        seconds += 2 * model.layers * REDUCE_SECONDS
    return 1e3 * seconds
