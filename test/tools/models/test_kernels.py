import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.sidecar import marlin as kernels
from sglang_qspec.sidecar.marlin import check_checkpoint, check_writable, marlin_misfit

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def marlin_source() -> str:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "kernels" / "jit" / "csrc" / "gemm" / "marlin"
    return (folder / "gptq_marlin.cuh").read_text()


@pytest.mark.parametrize("batch", ["small", "large"])
def test_the_tiles_are_those_of_the_installed_kernel(batch: str) -> None:
    table = re.search(rf"{batch}_batch_thread_configs\[\] = {{(.*?)}};", marlin_source(), re.S)
    assert table is not None
    tiles = [(int(k), int(n)) for k, n in re.findall(r"\{(\d+), (\d+), \d+\}", table[1])]
    if batch == "small":
        assert tuple(tiles) == kernels.MARLIN_TILES
    # A shape that fits a tile for a few rows also fits one for many.
    for k, n in kernels.MARLIN_TILES:
        assert any(k % wide_k == n % wide_n == 0 for wide_k, wide_n in tiles)


def test_the_layers_are_those_that_sglang_merges() -> None:
    found = [(layer.name, layer.inputs, layer.outputs) for layer in kernels.layers(LLAMA_8B)]
    assert found == [
        ("qkv_proj", 4096, 6144),
        ("o_proj", 4096, 4096),
        ("gate_up_proj", 4096, 28672),
        ("down_proj", 14336, 4096),
    ]
    wide_heads = {**LLAMA_8B, "head_dim": 256}
    assert kernels.layers(wide_heads)[0].outputs == 12288
    assert kernels.layers({"text_config": LLAMA_8B}) == kernels.layers(LLAMA_8B)
    assert kernels.layers({"d_model": 512}) == []


def test_marlin_takes_an_8b_model_and_not_the_demo_model() -> None:
    for group in (-1, 128, 32):
        assert marlin_misfit(LLAMA_8B, group) is None
    misfit = marlin_misfit(SMOLLM2_135M, -1)
    assert misfit is not None
    assert misfit.startswith("qkv_proj with 576 inputs and 960 outputs")


@pytest.mark.parametrize(
    ("hidden", "fits"), [(64, False), (128, True), (192, False), (256, True), (320, False)]
)
def test_marlin_takes_multiples_of_64_and_128(hidden: int, fits: bool) -> None:
    square = {"hidden_size": hidden, "intermediate_size": 512, "num_attention_heads": 1}
    assert (marlin_misfit(square, -1) is None) is fits


def test_marlin_takes_only_whole_groups_of_certain_sizes() -> None:
    odd = {**LLAMA_8B, "intermediate_size": 64 * 11 * 2}
    assert marlin_misfit(odd, 64) is None
    assert marlin_misfit({**LLAMA_8B, "intermediate_size": 64 * 11}, 128) is not None
    assert "groups of 16 weights" in (marlin_misfit(LLAMA_8B, 16) or "")


def test_a_copy_that_would_not_run_is_refused_with_what_to_do_instead() -> None:
    check_writable(Path("m"), LLAMA_8B, 128)
    with pytest.raises(ConfigError, match=r"would not run on CUDA: there is qkv_proj.*fp8"):
        check_writable(Path("m"), SMOLLM2_135M, -1)


@pytest.mark.parametrize(
    ("changes", "quantization", "refused"),
    [
        ({}, None, True),
        ({}, "gptq_marlin", True),
        ({}, "gptq", False),
        ({"quant_method": "awq"}, None, False),
        ({"bits": 3}, None, False),
        ({"group_size": 16}, None, False),
        ({"sym": False}, None, False),
    ],
)
def test_a_checkpoint_is_refused_exactly_if_sglang_would_run_it_with_marlin(
    tmp_path: Path, changes: dict[str, Any], quantization: str | None, refused: bool
) -> None:
    method = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, **changes}
    config = {**SMOLLM2_135M, "quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if refused:
        with pytest.raises(ConfigError, match="8-bit weights in GPTQ layout.*do not run on CUDA"):
            check_checkpoint(tmp_path, quantization=quantization)
    else:
        check_checkpoint(tmp_path, quantization=quantization)


def test_a_model_without_quantized_weights_or_on_a_hub_is_not_refused(tmp_path: Path) -> None:
    check_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    check_checkpoint(tmp_path)
