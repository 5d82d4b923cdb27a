"""Heads on disk: what was saved is loaded, and what is damaged is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_qspec.errors import ConfigError
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.model import Eagle2Head, Head
from sglang_qspec.heads.weights import load_weights
from test.heads.tiny import random_eagle2, random_head, random_hydra, random_medusa

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """A head in `folder` whose weights have been changed."""
    checkpoint.save(random_head(), folder, torch.float32)
    tensors = load_file(folder / checkpoint.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / checkpoint.WEIGHTS)
    return folder


def in_torch_format(folder: Path, content: object, name: str = "pytorch_model.bin") -> Path:
    """A folder with this content in place of the safetensors of its head."""
    (folder / checkpoint.WEIGHTS).unlink()
    torch.save(content, folder / name)
    return folder


def test_a_saved_head_is_loaded_again(tmp_path: Path) -> None:
    head = random_head()
    checkpoint.save(head, tmp_path, torch.float32)
    again = checkpoint.load(tmp_path, torch.float32, CPU)
    assert isinstance(again, Head)
    assert again.config.draft_vocab_size == 80
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(again.target_ids, head.target_ids)
    assert all(weight.dtype == torch.float32 for weight in again.parameters())


def test_weights_may_have_the_names_of_other_publishers(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("midlayer.", "model.layers.0.")] = tensors.pop(name)
        tensors["model.embed_tokens.weight"] = torch.zeros(260, 64)

    again = checkpoint.load(changed(tmp_path, rename), torch.bfloat16, CPU)
    assert isinstance(again, Head)
    wanted = random_head().state_dict()["midlayer.mlp.up_proj.weight"]
    assert torch.equal(again.midlayer.mlp.up_proj.weight, wanted.bfloat16())


def test_a_head_with_all_ids_needs_no_table(tmp_path: Path) -> None:
    head = random_head(260)
    checkpoint.save(head, tmp_path)
    tensors = load_file(tmp_path / checkpoint.WEIGHTS)
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, tmp_path / checkpoint.WEIGHTS)
    again = checkpoint.load(tmp_path, torch.float32, CPU)
    assert isinstance(again, Head)
    assert again.target_ids.tolist() == list(range(260))


@pytest.mark.parametrize("bias", [False, True])
def test_an_eagle_2_head_is_loaded_with_the_names_of_publishers(
    tmp_path: Path, *, bias: bool
) -> None:
    """Published checkpoints have copies of the target's weights, too."""
    head = random_eagle2(bias=bias)
    checkpoint.save(head, tmp_path, torch.float32)
    tensors = load_file(tmp_path / checkpoint.WEIGHTS)
    for name in list(tensors):
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    tensors |= {name: torch.zeros(260, 64) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, tmp_path / checkpoint.WEIGHTS)
    again = checkpoint.load(tmp_path, torch.float32, CPU)
    assert isinstance(again, Eagle2Head)
    assert again.state_dict().keys() == head.state_dict().keys()
    assert ("fc.bias" in again.state_dict()) is bias
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of_authors", [False, True])
def test_medusa_heads_are_loaded_with_the_names_of_publishers(
    tmp_path: Path, *, bias: bool, of_authors: bool
) -> None:
    heads = random_medusa(bias=bias)
    checkpoint.save(heads, tmp_path, torch.float32)
    if of_authors:
        tensors = load_file(tmp_path / checkpoint.WEIGHTS)
        for name in list(tensors):
            part, head, *rest = name.split(".")
            own = f"{head}.2.weight" if part == "lm_heads" else f"{head}.{rest[1]}.linear.{rest[2]}"
            tensors[own] = tensors.pop(name)
        in_torch_format(tmp_path, tensors, "medusa_lm_head.pt")
        content = {"medusa_num_heads": 5, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
        (tmp_path / "config.json").write_text(json.dumps(content))
    again = checkpoint.load_medusa(tmp_path, torch.float32, CPU)
    sizes = again.config.hidden_size, again.config.vocab_size, again.config.heads
    assert sizes == (64, 260, 5)
    assert again.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_heads.4.weight"), "has no weight lm_heads.4.weight"),
        (
            lambda tensors: tensors.update({"lm_heads.5.weight": torch.zeros(260, 64)}),
            "not supported: lm_heads.5.weight",
        ),
        (
            lambda tensors: tensors.update({"blocks.0.layers.1.bias": torch.zeros(3)}),
            r"has shape \[3\], but must have \[64\]",
        ),
    ],
)
def test_damaged_medusa_heads_are_named(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    checkpoint.save(random_medusa(), tmp_path, torch.float32)
    tensors = load_file(tmp_path / checkpoint.WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / checkpoint.WEIGHTS)
    with pytest.raises(ConfigError, match=message):
        checkpoint.load_medusa(tmp_path, torch.float32, CPU)


def test_a_hydra_head_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    head = random_hydra()
    checkpoint.save(head, tmp_path, torch.float32)
    again = checkpoint.load_hydra(tmp_path, torch.float32, CPU)
    assert (again.config.inner_size, again.config.draft_vocab_size) == (128, 80)
    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tensors = load_file(tmp_path / checkpoint.WEIGHTS)
    for change, message in (
        ({"d2t": tensors["d2t"] + 200}, "d2t leads to ids from .* but the target has 260 ids"),
        ({"up.weight": torch.zeros(3, 128)}, r"up.weight has shape \[3, 128\], but must have"),
        ({"more": torch.zeros(1)}, "has weights that are not supported: more"),
    ):
        save_file({**tensors, **change}, tmp_path / checkpoint.WEIGHTS)
        with pytest.raises(ConfigError, match=message):
            checkpoint.load_hydra(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "has no weight fc.weight"),
        (lambda tensors: tensors.pop("d2t"), "has no weight d2t"),
        (
            lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 64)}),
            r"fc.weight has shape \[64, 64\], but must have \[64, 192\]",
        ),
        (
            lambda tensors: tensors.update({"layers.1.mlp.up_proj.weight": torch.zeros(1)}),
            "not supported: layers.1.mlp.up_proj.weight",
        ),
        (lambda tensors: tensors["d2t"].add_(1000), "leads to ids from .* the target has 260 ids"),
    ],
)
def test_damaged_weights_are_named(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checkpoint.load(changed(tmp_path, change), torch.float32, CPU)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    checkpoint.save(random_head(), tmp_path)
    path = tmp_path / checkpoint.WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="model.safetensors: "):
        checkpoint.load(tmp_path, torch.float32, CPU)
    path.unlink()
    with pytest.raises(ConfigError, match=r"has no weights: no file \*.safetensors, \*.bin or"):
        checkpoint.load(tmp_path, torch.float32, CPU)
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(ConfigError, match="has no weights"):
        checkpoint.load(tmp_path, torch.float32, CPU)


def test_weights_may_be_in_the_format_of_torch(tmp_path: Path) -> None:
    checkpoint.save(random_head(), tmp_path, torch.float32)
    wanted = checkpoint.load(tmp_path, torch.float32, CPU).state_dict()
    folder = in_torch_format(tmp_path, load_file(tmp_path / checkpoint.WEIGHTS))
    found = checkpoint.load(folder, torch.float32, CPU).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


class Opens:
    """An object that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


def test_a_file_in_the_format_of_torch_runs_no_code(tmp_path: Path) -> None:
    checkpoint.save(random_head(), tmp_path)
    made = tmp_path / "made"
    folder = in_torch_format(tmp_path, {"fc.weight": Opens(made)})
    with pytest.raises(ConfigError, match="pytorch_model.bin is not a file of tensors"):
        checkpoint.load(folder, torch.float32, CPU)
    assert not made.exists()


@pytest.mark.parametrize("as_zip", [False, True])
def test_damaged_files_in_the_format_of_torch(tmp_path: Path, *, as_zip: bool) -> None:
    checkpoint.save(random_head(), tmp_path)
    path = in_torch_format(tmp_path, {}) / "pytorch_model.bin"
    tensors = {"a": torch.zeros(4, 4), "b": torch.zeros(5)}
    torch.save(tensors, path, _use_new_zipfile_serialization=as_zip)
    content, random = path.read_bytes(), Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content[: random.randrange(len(content))] or content)
        if random.random() < 0.7:
            damaged = bytearray(content)
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        path.write_bytes(damaged)
        try:  # a changed number is no damage that a reader can see
            load_weights(tmp_path, CPU)
        except ConfigError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"fc.weight": 1.0}, {1: torch.zeros(1)}])
def test_a_file_in_the_format_of_torch_has_tensors_by_name(tmp_path: Path, content: object) -> None:
    checkpoint.save(random_head(), tmp_path)
    in_torch_format(tmp_path, content)
    with pytest.raises(ConfigError, match="has other values than tensors by name"):
        checkpoint.load(tmp_path, torch.float32, CPU)
