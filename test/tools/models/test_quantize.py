"""Quantized drafts: the nearest integers on a symmetric grid; all else equals the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.tools.models import DemoModels
from sglang_qspec.tools.models.quantize import GroupSize, quantize, rounded
from test.random_llama import write_random_llama

LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def tiny(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two small layers, with the demo model's tokenizer."""
    return write_random_llama(
        tmp_path_factory.mktemp("source") / "tiny",
        models,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def unpacked(tensors: dict[str, torch.Tensor], bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The signed integers [out, in] of a GPTQ layer, and the scale of each."""
    packed, scales = tensors[f"{LAYER}.qweight"], tensors[f"{LAYER}.scales"].float()
    places = torch.arange(0, 32, bits, dtype=torch.int32)
    unsigned = (packed[:, None, :] >> places[None, :, None]) & (2**bits - 1)
    signed = unsigned.reshape(-1, packed.shape[1]) - 2 ** (bits - 1)
    return signed.T, scales.repeat_interleave(len(signed) // len(scales), 0).T


@pytest.mark.parametrize(("bits", "group", "scales"), [(8, None, 1), (4, 32, 4), (4, "channel", 1)])
def test_a_quantized_weight_is_the_nearest_point_of_its_grid(
    tiny: Path, tmp_path: Path, bits: int, group: GroupSize | None, scales: int
) -> None:
    folder = quantize(tiny, bits, group, tmp_path / "draft")
    source, made = load_file(tiny / "model.safetensors"), load_file(folder / "model.safetensors")
    integers, scale = unpacked(made, bits)
    assert made[f"{LAYER}.scales"].shape == (scales, 64)
    distance = (integers * scale - source[f"{LAYER}.weight"].float()).abs() / scale
    # The error is half a step, but a whole step where the symmetric range lacks a point.
    assert distance.max() <= 1.01
    assert distance[integers.abs() < 2 ** (bits - 1) - 1].max() <= 0.501
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["sym"]) == ("gptq", bits, True)
    assert config["group_size"] == (group if isinstance(group, int) else -1)


def test_weights_that_are_not_quantized_equal_those_of_the_source(models: DemoModels) -> None:
    source = load_file(models.target / "model.safetensors")
    made = load_file(models.draft / "model.safetensors")
    kept = source.keys() & made.keys()
    assert len(kept) == 62  # the embedding, two norms a block, the last norm
    assert all(torch.equal(source[name], made[name]) for name in kept)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (models.draft / name).read_bytes() == (models.target / name).read_bytes()
    assert json.loads((models.draft / "config.json").read_text())["dtype"] == "bfloat16"


def test_for_cuda_a_model_that_marlin_does_not_take_is_refused_before_it_is_written(
    models: DemoModels, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="qkv_proj with 576 inputs and 960 outputs"):
        quantize(models.target, 8, output=tmp_path / "draft", device="cuda")
    assert not (tmp_path / "draft").exists()


def test_a_rounded_model_has_the_quantized_weights_in_bfloat16(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_QSPEC_CACHE", str(tmp_path / "cache"))
    quantized = quantize(tiny, 4, 32, tmp_path / "draft")
    folder = rounded(quantized, tiny)
    source, made = load_file(tiny / "model.safetensors"), load_file(folder / "model.safetensors")
    assert {name: each.shape for name, each in made.items()} == {
        name: each.shape for name, each in source.items()
    }
    integers, scale = unpacked(load_file(quantized / "model.safetensors"), 4)
    assert torch.equal(made[f"{LAYER}.weight"], (integers * scale).bfloat16())
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(made[norm], source[norm])
    assert (folder / "config.json").read_text() == (tiny / "config.json").read_text()
    assert rounded(quantized, tiny) == folder


@pytest.mark.parametrize("bits", [0, 2, 3, 16])
def test_unsupported_bit_widths_are_refused(models: DemoModels, bits: int) -> None:
    with pytest.raises(ConfigError, match=f"bits is {bits}, but must be 4 or 8"):
        quantize(models.target, bits)


def test_a_group_that_does_not_divide_the_widths_is_refused(models: DemoModels) -> None:
    with pytest.raises(ConfigError, match="group size is 128, but must be one of 64, 32, channel"):
        quantize(models.target, 4, 128)


def test_a_quantized_model_is_not_quantized_again(models: DemoModels) -> None:
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize(models.draft, 8)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be the folder of a local checkpoint"):
        quantize(tmp_path, 8)


def test_an_output_folder_that_is_not_empty_stays_unchanged(
    models: DemoModels, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("keep")
    with pytest.raises(QSpecError, match="exists already"):
        quantize(models.target, 8, output=tmp_path)
    assert (tmp_path / "precious").read_text() == "keep"
