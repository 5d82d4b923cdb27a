"""The compiled decoder of a draft model that SGLang loads gives the same logits, step by step."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from sglang_qspec.cpu.native import native
from sglang_qspec.models import DemoModels
from test.random_llama import write_random_llama

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX-512 with VNNI")

PROGRAM = """
import json, sys
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.loading import DraftModelOptions

path, prompts = json.load(sys.stdin)
model = DraftModel(
    DraftModelOptions(path, quantization="qspec_int8", device="cpu", max_total_tokens=512,
                      context_len=128, rows=4)
)
rows = [model.open() for _ in prompts]
model.extend(rows, [prompt[:-1] for prompt in prompts])
stepped = model.step(rows, [prompt[-1] for prompt in prompts])
model.truncate(rows[0], len(prompts[0]) - 2)
again = model.extend(rows[:1], [prompts[0][-2:]])
decoder = model._runner.model.model.__dict__["_qspec_decoder"][1]
print(json.dumps([decoder.drafting is not None, stepped.tolist(), again.tolist()]))
"""
PROMPTS = [[504, 3575, 282, 4649, 314], list(range(1000, 1040))]


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
    program = PROGRAM.replace('device="cpu"', f'device="cpu", dtype="{dtype}"')
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([str(path), PROMPTS]),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    compiled, *results = json.loads(ended.stdout.splitlines()[-1])
    assert compiled
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS])
    for result, rows in zip(results, (expected, expected[:1]), strict=True):
        assert 0 < float((torch.tensor(result) - rows).norm() / rows.norm()) < 0.05
