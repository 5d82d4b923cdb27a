"""A GGUF file becomes the checkpoint that it was written from."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.tools.models import convert, gguf_file, gguf_weights, safetensors_file
from sglang_qspec.tools.models.intact import check_intact
from test.tools.models.gguf_files import BPE, SPM, write_gguf
from test.tools.models.test_gguf_families import CASES, SHAPE, logits, model_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**rope: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 64}
    return LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **shape))


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", model_of("qwen2"), "qwen2", BPE)


def test_the_tokenizer_of_a_gemma_file_adds_no_space(tmp_path: Path) -> None:
    fields = CASES["gemma2"][2]
    file = write_gguf(tmp_path / "model.gguf", model_of("gemma2"), "gemma2", SPM, fields)
    assert tokenizer_of(convert(file, tmp_path / "made")).encode("ab a") == [2, 8, 7]


def test_weights_are_rounded_to_bfloat16_by_default(file: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = convert(file, tmp_path / "made")
    made = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(made[name], model_of("qwen2").state_dict()[name].bfloat16())
    # The file has the epsilon as float32.
    assert json.loads((folder / "config.json").read_text())["rms_norm_eps"] == 1e-6


def test_the_tokenizer_has_the_files_tokens_and_splits(file: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(convert(file, tmp_path / "made"))
    text = " a1212 naïve 日本<|end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Qwen2 splits numbers into digits, so the merge of two digits never applies.
    found = tokenizer.convert_ids_to_tokens(tokenizer.encode(" a12<|end|>"))
    assert found == ["Ġa", "1", "2", "<|end|>"]
    assert tokenizer.eos_token_id == 258


def test_no_token_is_added_to_those_of_the_file(tmp_path: Path) -> None:
    tokens, kinds = BPE["tokens"][:259], BPE["token_type"][:259]
    exact = {**BPE, "tokens": tokens, "token_type": kinds}
    file = write_gguf(tmp_path / "model.gguf", model_of("qwen2"), "qwen2", exact)
    vocabulary = tokenizer_of(convert(file, tmp_path / "made")).get_vocab()
    assert vocabulary == {token: token_id for token_id, token in enumerate(tokens)}


def test_ids_without_a_token_have_none_in_the_tokenizer(file: Path, tmp_path: Path) -> None:
    folder = convert(file, tmp_path / "made")
    assert sorted(tokenizer_of(folder).get_vocab().values()) == list(range(259))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 272


def test_the_scaled_positions_of_llama_3_are_kept(tmp_path: Path) -> None:
    model = llama(**LLAMA3)
    plain = llama(rope_type="default", rope_theta=500000.0)
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    added = {"rope_freqs.weight": factors.float()}
    file = write_gguf(
        tmp_path / "model.gguf", model, "llama", {**BPE, "pre": "llama-bpe"}, tensors=added
    )
    made = loaded(convert(file, tmp_path / "made", dtype="float32"))
    assert made.config.rope_parameters == LLAMA3
    assert torch.equal(logits(made), logits(model))


@pytest.mark.parametrize(
    ("fields", "tensor", "message"),
    [
        ({"rope.scaling.type": "yarn"}, None, "rope.scaling.type 'yarn', but only 'none'"),
        (None, "rope_factors_long.weight", "'rope_factors_long.weight', .* would be lost"),
        (None, "rope_freqs.weight", "scaled rotary positions"),
    ],
)
def test_other_scaled_positions_are_refused(
    tmp_path: Path, fields: dict[str, Any] | None, tensor: str | None, message: str
) -> None:
    model = llama(rope_type="default", rope_theta=10000.0)
    added = {tensor: torch.arange(1.0, 9.0)} if tensor else None
    file = write_gguf(
        tmp_path / "model.gguf", model, "llama", {**BPE, "pre": "gpt-2"}, fields, added
    )
    with pytest.raises(QSpecError, match=message):
        convert(file, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_an_unknown_split_of_texts_needs_the_models_own_tokenizer(
    file: Path, tmp_path: Path
) -> None:
    folder = convert(file, tmp_path / "known")
    odd = write_gguf(tmp_path / "odd.gguf", model_of("qwen2"), "qwen2", {**BPE, "pre": "odd"})
    with pytest.raises(QSpecError, match="splits text as 'odd'.*--tokenizer"):
        convert(odd, tmp_path / "made")
    made = convert(odd, tmp_path / "made", tokenizer=folder)
    assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_file_without_all_weights_is_refused(tmp_path: Path) -> None:
    model = model_of("qwen2")
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(QSpecError, match=r"no weights for model.layers.1.mlp.up_proj.weight"):
        convert(write_gguf(tmp_path / "m.gguf", model, "qwen2", BPE), tmp_path / "made")


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    model = llama(rope_type="default", rope_theta=10000.0)
    unknown = write_gguf(tmp_path / "odd.gguf", model, "granite", BPE)
    with pytest.raises(QSpecError, match="architecture 'granite', but can be converted only with"):
        convert(unknown, tmp_path / "made")


def test_arguments_that_are_not_allowed_are_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8', but must be one of bfloat16"):
        convert(file, tmp_path / "made", dtype="int8")
    with pytest.raises(ConfigError, match="there is no such file"):
        convert(tmp_path / "none.gguf", tmp_path / "made")
    with pytest.raises(ConfigError, match="no tokenizer is there"):
        convert(file, tmp_path / "made", tokenizer=tmp_path / "none")
    with pytest.raises(QSpecError, match="exists already"):
        convert(file, tmp_path)


def test_two_pieces_of_the_weights_at_most_are_in_memory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tensors the file has, and however large they are."""
    monkeypatch.setattr(gguf_file, "_CHUNK_BYTES", 1024)
    pieces: list[weakref.ref[torch.Tensor]] = []
    sizes: list[int] = []
    original = gguf_weights._pieces

    def watched(*given: Any) -> Iterator[torch.Tensor]:
        for piece in original(*given):
            pieces.append(weakref.ref(piece))
            sizes.append(piece.nbytes)
            assert sum(each() is not None for each in pieces) <= 2
            yield piece

    monkeypatch.setattr(gguf_weights, "_pieces", watched)
    made = convert(file, tmp_path / "made", dtype="float32")
    assert torch.equal(logits(loaded(made)), logits(model_of("qwen2")))
    assert len(pieces) > 100
    assert max(sizes) <= 1024


def test_weights_are_divided_into_files_of_a_limited_size(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "SHARD_BYTES", 20000)
    made = convert(file, tmp_path / "made", dtype="float32")
    shards = sorted(made.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert torch.equal(logits(loaded(made)), logits(model_of("qwen2")))
    check_intact(made)
