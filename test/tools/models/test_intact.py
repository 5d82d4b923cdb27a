"""A broken checkpoint is refused in one line, before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sglang_qspec.__main__ import main
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models.files import INDEX
from sglang_qspec.tools.models.intact import check_intact

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of a tiny model in several files."""
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(
        tmp_path / "model", max_shard_size="40KB"
    )
    return tmp_path / "model"


def shard_of(model: Path, name: str) -> Path:
    index = json.loads((model / INDEX).read_text())
    return model / index["weight_map"][name]


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = shard_of(model, UP)
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def change_index(model: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads((model / INDEX).read_text())
    change(content)
    (model / INDEX).write_text(json.dumps(content))


def remove_weights(model: Path) -> None:
    for path in (model / INDEX, *model.glob("*.safetensors")):
        path.unlink()


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no shard": (lambda model: shard_of(model, UP).unlink(), "there is no such file"),
    "cut shard": (lambda model: cut(shard_of(model, UP), 3000), "cannot be read"),
    "cut header": (lambda model: cut(shard_of(model, UP), 20), "cannot be read"),
    "empty shard": (lambda model: cut(shard_of(model, UP), 0), "cannot be read"),
    "pointer": (
        lambda model: shard_of(model, UP).write_text("version https://git-lfs.github.com/spec/v1"),
        "cannot be read",
    ),
    "no shards": (lambda model: remove_weights(model), "has no .safetensors files"),
    "no weight": (
        lambda model: change_weights(model, lambda weights: weights.pop(UP)),
        f"has {UP!r}, but it has not",
    ),
    "shape": (
        lambda model: change_weights(model, lambda weights: weights.update({UP: torch.ones(3, 4)})),
        f"has {UP} of the shape \\[3, 4\\], but its configuration needs \\[64, 32\\]",
    ),
    "cut index": (lambda model: cut(model / INDEX, 50), "cannot be read"),
    "list as index": (lambda model: (model / INDEX).write_text("[]"), "weight_map None, but must"),
    "no map": (lambda model: change_index(model, dict.clear), "weight_map None, but must have"),
    "path": (
        lambda model: change_index(model, lambda index: index.update(weight_map={UP: "../x"})),
        "places .* in '../x', but must name a file",
    ),
    "more layers": (
        lambda model: (model / "config.json").write_text(
            json.dumps({**json.loads((model / "config.json").read_text()), "num_hidden_layers": 3})
        ),
        "has no model.layers.2.* which its configuration needs",
    ),
    "family": (
        lambda model: (model / "config.json").write_text('{"model_type": "unheard-of"}'),
        "cannot be loaded",
    ),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_what_is_broken_is_named_in_one_line(kind: str, model: Path) -> None:
    check_intact(model)
    damage, message = BREAKS[kind]
    damage(model)
    with pytest.raises(ConfigError, match=message) as caught:
        check_intact(model)
    assert "\n" not in str(caught.value)


def test_experts_and_tied_embeddings_are_intact(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **experts, head_dim=8, tie_word_embeddings=True)
    ).save_pretrained(tmp_path)
    check_intact(tmp_path)


@pytest.mark.parametrize("task", [["quantize", "--bits", "8"], ["skip-layers", "--keep", "1"]])
def test_the_commands_refuse_a_broken_checkpoint(
    task: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard_of(model, UP).unlink()
    output = tmp_path / "made"
    assert main(["models", *task, "--model", str(model), "--output", str(output)]) == 1
    assert "there is no such file" in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()
