"""The bytes that `bench_decode` counts for a decode pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmark.bench_decode import bandwidth_of, weight_bytes

TABLE, LAYER, HEAD = torch.zeros(10, 4), torch.zeros(6, 4), torch.zeros(12, 4)
PLAIN = {
    "model.embed_tokens.weight": TABLE,
    "model.layers.0.mlp.up_proj.weight": LAYER,
    "model.norm.weight": torch.zeros(4),
}
QUANTIZED = {
    "model.embed_tokens.weight": TABLE,
    "model.layers.0.mlp.up_proj.qweight": torch.zeros(1, 6, dtype=torch.int32),
    "model.layers.0.mlp.up_proj.scales": torch.zeros(1, 6),
}


@pytest.mark.parametrize(
    ("tensors", "dtype", "expected"),
    [
        pytest.param(PLAIN, "bfloat16", 2 * (40 + 24), id="the head is the embedding table"),
        pytest.param(PLAIN, "float32", 4 * (40 + 24), id="float32"),
        pytest.param({**PLAIN, "lm_head.weight": HEAD}, "bfloat16", 2 * (24 + 48), id="own head"),
        pytest.param(QUANTIZED, "bfloat16", 24 + 40, id="8 bits"),
        pytest.param({**QUANTIZED, "lm_head.weight": HEAD}, "bfloat16", 24 + 48, id="8 bits, head"),
    ],
)
def test_a_pass_reads_each_matrix_once_and_no_embedding_table(
    tensors: dict[str, torch.Tensor], dtype: str, expected: int, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, dtype) == expected


def test_the_bandwidth_is_measured_again_for_each_question() -> None:
    with bandwidth_of("0", 2**20) as measure:
        assert measure() > 0
        assert measure() > 0
