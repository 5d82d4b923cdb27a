"""The configurations without weights have the shapes that they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.gpu_check import dummy
from sglang_qspec.sidecar.marlin import layers
from sglang_qspec.tools.models import DemoModels


@pytest.mark.parametrize(("shape", "billions"), [("llama-8b", 8.03), ("llama-1b", 1.236)])
def test_a_shape_has_the_parameters_of_the_model_that_it_is_named_after(
    shape: str, billions: float
) -> None:
    config = dummy.SHAPES[shape]
    inner = sum(layer.inputs * layer.outputs for layer in layers(config))
    inner += 2 * config["hidden_size"]
    embedded = config["vocab_size"] * config["hidden_size"]
    total = config["num_hidden_layers"] * inner + config["hidden_size"]
    total += embedded if config["tie_word_embeddings"] else 2 * embedded
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)


def test_transformers_reads_a_written_configuration(
    tmp_path: Path, models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    monkeypatch.setattr(dummy, "demo_models", lambda: models)
    for shape, expected in dummy.SHAPES.items():
        folder = dummy.write(tmp_path, shape)
        config = AutoConfig.from_pretrained(folder)
        assert {name: getattr(config, name) for name in expected} == expected
        assert config.rope_parameters["rope_theta"] == 500000.0
        assert (folder / "tokenizer.json").stat().st_size > 1000
