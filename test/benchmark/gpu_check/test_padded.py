"""A padded model has more parameters and the logits of the small one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmark.gpu_check.padded import TOKENIZER, pad


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, also of its norms."""
    folder = tmp_path_factory.mktemp("models") / "small"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=0.01,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(("factor", "intermediate"), [(1, 56), (4, 40), (16, 100)])
def test_a_padded_model_has_the_logits_of_the_small_one(
    small: Path, tmp_path: Path, factor: int, intermediate: int
) -> None:
    count = pad(small, tmp_path / "padded", factor, intermediate)
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (small, tmp_path / "padded")]
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        given, padded = (model(tokens).logits for model in models)
    torch.testing.assert_close(padded, given, rtol=1e-4, atol=1e-4)
    assert models[1].num_parameters() == count
    assert models[1].config.hidden_size == 24 * factor
    assert models[1].config.intermediate_size == intermediate


@pytest.mark.parametrize(
    ("factor", "intermediate", "message"),
    [(2, 40, "factor is 2"), (9, 40, "factor is 9"), (4, 39, "intermediate is 39")],
)
def test_sizes_that_cannot_be_exact_are_refused(
    small: Path, tmp_path: Path, factor: int, intermediate: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pad(small, tmp_path / "padded", factor, intermediate)
