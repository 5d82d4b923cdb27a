"""The demo target is the model in the installed file, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from huggingface_hub import constants
from safetensors import safe_open

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.models import DemoModels, demo
from sglang_qspec.tools.models.convert import convert
from sglang_qspec.tools.models.gguf_file import read
from sglang_qspec.tools.models.gguf_tokenizer import write_tokenizer

# Digits, a space before a word, accents, an emoji of several code points, code.
TEXT = "In 1969, the café cost $12.50.\n\n\tdef f(x):\n        return x**2  # naïve 👩‍🚀 日本語"


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(demo.gguf_file())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new conversion, because the cached one may be older than the code."""
    folder = tmp_path_factory.mktemp("converted") / "target"
    convert(demo.gguf_file(), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def weight(target: Path, name: str) -> torch.Tensor:
    with safe_open(target / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name)


def q4_1_row(data: np.ndarray) -> torch.Tensor:
    """One row of Q4_1: blocks of 32 weights, each with scale, minimum and 16 bytes of nibbles."""
    values = []
    for block in data.reshape(-1, 20):
        scale, low = block[:4].view(np.float16).astype(np.float32)
        nibbles = np.concatenate([block[4:] & 15, block[4:] >> 4]).astype(np.float32)
        values.append(nibbles * scale + low)
    return torch.tensor(np.concatenate(values)).to(torch.bfloat16)


def tensor_data(reader: GGUFReader, name: str) -> np.ndarray:
    return next(np.asarray(tensor.data) for tensor in reader.tensors if tensor.name == name)


def test_the_cached_target_equals_a_new_conversion(models: DemoModels, target: Path) -> None:
    for path in target.iterdir():
        assert path.read_bytes() == (models.target / path.name).read_bytes(), (
            f"{path.name} differs: raise demo.CONVERSION"
        )


def test_a_conversion_without_the_hub_is_the_same(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not constants.HF_HUB_OFFLINE)
    write_tokenizer(read(demo.gguf_file()), tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (target / path.name).read_bytes()


def test_a_weight_is_the_files_value_rounded_to_bfloat16(target: Path, reader: GGUFReader) -> None:
    row = q4_1_row(tensor_data(reader, "blk.7.ffn_up.weight")[11])
    assert torch.equal(weight(target, "model.layers.7.mlp.up_proj.weight")[11], row)


@pytest.mark.parametrize("kind", ["q", "k"])
def test_rows_of_queries_and_keys_are_in_the_order_of_rotary_halves(
    target: Path, reader: GGUFReader, kind: str
) -> None:
    data = tensor_data(reader, f"blk.3.attn_{kind}.weight")
    made = weight(target, f"model.layers.3.self_attn.{kind}_proj.weight")
    head, dimension = 2, 64
    for pair in (0, 5, 31):  # the file stores the two rows of a pair side by side
        first = head * dimension + 2 * pair
        half = head * dimension + pair
        assert torch.equal(made[half], q4_1_row(data[first]))
        assert torch.equal(made[half + 32], q4_1_row(data[first + 1]))


def test_the_target_has_every_weight_of_the_file_and_a_tied_head(
    target: Path, reader: GGUFReader
) -> None:
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == len(reader.tensors) == 272
    assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_tokenizer_returns_a_text_unchanged(tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_whole(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    assert len(tokenizer) == 49152


def test_the_end_of_turn_token_is_that_of_the_model_config(target: Path, tokenizer: Any) -> None:
    config = json.loads((target / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_template_opens_the_assistants_turn(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")


def test_the_target_answers_a_question_and_ends_its_turn(target: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no-such-package")
    with pytest.raises(QSpecError, match="no-such-package, which is not installed"):
        demo.gguf_file.__wrapped__()


def test_a_damaged_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FILE_SHA256", "0" * 64)
    with pytest.raises(QSpecError, match="is damaged"):
        demo.gguf_file.__wrapped__()
