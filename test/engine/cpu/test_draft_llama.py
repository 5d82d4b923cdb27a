"""The compiled decoder of a draft model that SGLang loads gives the same logits, step by step."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from sglang_qspec.cpu.native import native
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.loading import DraftModelOptions
from sglang_qspec.tools.models import DemoModels
from test.forked import run
from test.random_llama import write_random_llama

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX2")

PROMPTS = [[504, 3575, 282, 4649, 314], list(range(1000, 1040))]


def logits_of(path: str, dtype: str) -> tuple[bool, list[list[float]], list[list[float]]]:
    """Whether the decoder is compiled, and the logits after a step and after a truncation."""
    model = DraftModel(
        DraftModelOptions(
            path,
            quantization="qspec_int8",
            device="cpu",
            dtype=dtype,
            max_total_tokens=512,
            context_len=128,
            rows=4,
        )
    )
    rows = [model.rows.open() for _ in PROMPTS]
    model.extend(rows, [prompt[:-1] for prompt in PROMPTS])
    stepped = model.step(rows, [prompt[-1] for prompt in PROMPTS])
    model.rows.truncate(rows[0], len(PROMPTS[0]) - 2)
    again = model.extend(rows[:1], [PROMPTS[0][-2:]])
    decoder = model._runner.model.model.__dict__["_qspec_decoder"][1]
    return decoder.drafting is not None, stepped.tolist(), again.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_decoder_gives_the_logits_of_the_draft_models_source(
    models: DemoModels, tmp_path: Path, dtype: str
) -> None:
    path = write_random_llama(
        tmp_path / "source",
        models,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.1,
    )
    compiled, *results = run(logits_of, str(path), dtype)
    assert compiled
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS])
    for result, rows in zip(results, (expected, expected[:1]), strict=True):
        assert 0 < float((torch.tensor(result) - rows).norm() / rows.norm()) < 0.05
