"""The layers that a self-draft leaves out are those that the model misses least."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.tools.models import DemoModels, skip_layers
from sglang_qspec.tools.models.decoder import Decoder
from sglang_qspec.tools.models.skip_layers import choose

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
PROMPTS = ("Say hello to the world.", "Count to five.")


def write_model(folder: Path, models: DemoModels, *, idle: tuple[int, ...], **saving: Any) -> Path:
    """A random Llama in which the layers `idle` change nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return save(LlamaForCausalLM(LlamaConfig(**SHAPE)), folder, models, idle, **saving)


def save(
    model: Any, folder: Path, models: DemoModels, idle: tuple[int, ...], **saving: Any
) -> Path:
    for number in idle:
        layer = model.model.layers[number]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            torch.nn.init.zeros_(weight)
    model.save_pretrained(folder, **saving)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.target / name, folder / name)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.mark.parametrize("idle", [(0, 2), (1, 3)])
def test_layers_that_change_nothing_go_first(
    models: DemoModels, tmp_path: Path, idle: tuple[int, ...]
) -> None:
    model = write_model(tmp_path / "model", models, idle=idle)
    made = skip_layers(model, 2, tmp_path / "made", prompts=PROMPTS, tokens=4)
    before, after = weights_of(model), weights_of(made)
    kept = sorted({0, 1, 2, 3} - set(idle))
    for new, old in enumerate(kept):
        name = "mlp.up_proj.weight"
        assert torch.equal(
            after[f"model.layers.{new}.{name}"], before[f"model.layers.{old}.{name}"]
        )
    assert not any(name.startswith("model.layers.2") for name in after)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 2
    assert (made / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_the_fit_is_that_of_the_model_without_the_layers(
    models: DemoModels, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path / "model", models, idle=())
    decoder = Decoder(model)
    prompts, answers = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14]]
    decoder.read(prompts, answers)
    kept, fit = choose(decoder, 3)
    cut = AutoModelForCausalLM.from_pretrained(model)
    full = AutoModelForCausalLM.from_pretrained(model)
    cut.model.layers = torch.nn.ModuleList([cut.model.layers[layer] for layer in kept])
    overlaps, same = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            p, q = (
                each(torch.tensor([prompt + answer]), use_cache=False)
                .logits[0, len(prompt) - 1 : -1]
                .softmax(-1)
                for each in (full, cut)
            )
        overlaps += torch.minimum(p, q).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    assert fit.overlap == pytest.approx(sum(overlaps) / 5, abs=1e-4)
    assert fit.agreement == pytest.approx(sum(same) / 5)
    others = [
        decoder.fit(decoder.logits([0, 1, 2, 3][:i] + [0, 1, 2, 3][i + 1 :])) for i in range(4)
    ]
    assert fit == max(others)


def test_layers_of_different_types_keep_their_types(models: DemoModels, tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4}
    gemma = Gemma2ForCausalLM(Gemma2Config(**shape))
    # The norm after each block would scale its zeros.
    model = save(gemma, tmp_path / "model", models, (1, 2))
    types = json.loads((model / "config.json").read_text())["layer_types"]
    made = skip_layers(model, 2, tmp_path / "made", prompts=PROMPTS, tokens=4)
    found = json.loads((made / "config.json").read_text())
    assert found["layer_types"] == [types[0], types[3]]


def test_a_checkpoint_in_parts_stays_in_parts(models: DemoModels, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", models, idle=(1,), max_shard_size="5MB")
    assert len(list(model.glob("*.safetensors"))) > 1
    made = skip_layers(model, 3, tmp_path / "made", prompts=PROMPTS, tokens=4)
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights_of(made).keys()


def test_the_rest_can_be_quantized(models: DemoModels, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", models, idle=(0,))
    made = skip_layers(model, 2, tmp_path / "made", prompts=PROMPTS, tokens=4, bits=8)
    config = json.loads((made / "config.json").read_text())
    assert (config["quantization_config"]["bits"], config["num_hidden_layers"]) == (8, 2)
    assert "model.layers.1.mlp.up_proj.qweight" in weights_of(made)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["made", "model"]


def test_a_configuration_that_cannot_say_which_layers_are_left_is_refused(
    models: DemoModels, tmp_path: Path
) -> None:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.manual_seed(0)
    config = SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1, 1], pad_token_id=0)
    model = save(SmolLM3ForCausalLM(config), tmp_path / "model", models, (1,))
    # Without the list, transformers derives the layers without rotary positions from the interval.
    content = json.loads((model / "config.json").read_text())
    del content["no_rope_layers"]
    content["no_rope_layer_interval"] = 2
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(QSpecError, match="does not say which ones are left out"):
        skip_layers(model, 3, tmp_path / "made", prompts=PROMPTS, tokens=4)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("keep", [0, 4])
def test_a_number_of_layers_that_is_not_allowed_is_named(
    models: DemoModels, tmp_path: Path, keep: int
) -> None:
    model = write_model(tmp_path / "model", models, idle=())
    with pytest.raises(ConfigError, match=f"keep is {keep}, but must be from 1 to 3"):
        skip_layers(model, keep, tmp_path / "made")


def test_a_wrong_number_of_bits_is_refused_before_the_measurement(
    models: DemoModels, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", models, idle=())
    (model / "model.safetensors").unlink()  # so a measurement would fail
    with pytest.raises(ConfigError, match="bits is 5, but must be 4 or 8"):
        skip_layers(model, 2, tmp_path / "made", bits=5)
