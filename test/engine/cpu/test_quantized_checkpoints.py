"""Checkpoints of auto-round, and weights rounded at loading, keep their source's logits on a CPU.

The models are small and random, so every weight matters. A wrong layout, a zero point that is off
by one, or a shifted group gives logits without relation to the logits of the source.
"""

import shutil
from pathlib import Path

import pytest
import torch

from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.loading import DraftModelOptions
from sglang_qspec.tools.models import DemoModels
from test.forked import run
from test.random_llama import write_random_llama

TOKENS = [[504, 3575, 282, 4649, 314], list(range(1000, 1040)), [7]]


@pytest.fixture(scope="module")
def source(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with widths that are multiples of 32."""
    return write_random_llama(
        tmp_path_factory.mktemp("models") / "source",
        models,
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
    )


@pytest.fixture(scope="module")
def expected(source: Path) -> torch.Tensor:
    """Logits of the float source after each prompt in TOKENS, by transformers: [prompts, V]."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in TOKENS])


def exported(source: Path, folder: Path, layout: str, bits: int, group: int, sym: bool) -> Path:
    from auto_round import AutoRound

    AutoRound(
        str(source),
        bits=bits,
        group_size=group,
        sym=sym,
        iters=0,
        disable_opt_rtn=True,
        disable_model_free=True,
        device_map="cpu",
    ).quantize_and_save(str(folder), format=layout)
    written = next(folder.rglob("config.json")).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, written / name)
    return written


def relative_error(path: Path, quantization: str | None, expected: torch.Tensor) -> float:
    """Relative error of the logits, from a separate process: SGLang keeps one model per process."""
    values = torch.tensor(run(logits_of, str(path), quantization))
    return float((values - expected).norm() / expected.norm())


def logits_of(path: str, quantization: str | None) -> list[list[float]]:
    """The sidecar's logits after each prompt in TOKENS."""
    model = DraftModel(
        DraftModelOptions(
            path,
            quantization=quantization,
            dtype="float32",
            device="cpu",
            max_total_tokens=512,
            context_len=128,
            rows=4,
        )
    )
    rows = [model.rows.open() for _ in TOKENS]
    values: list[list[float]] = model.extend(rows, TOKENS).tolist()
    return values


@pytest.mark.parametrize(
    ("layout", "bits", "group", "sym", "tolerance"),
    [
        ("auto_gptq", 8, -1, True, 0.04),
        ("auto_gptq", 4, 32, True, 0.3),
        ("auto_gptq", 4, 32, False, 0.3),
        ("auto_awq", 4, 32, False, 0.3),
        ("auto_round", 4, 32, True, 0.3),
    ],
)
def test_an_exported_checkpoint_keeps_the_logits_of_its_source(
    source: Path,
    expected: torch.Tensor,
    tmp_path: Path,
    layout: str,
    bits: int,
    group: int,
    sym: bool,
    tolerance: float,
) -> None:
    checkpoint = exported(source, tmp_path / "export", layout, bits, group, sym)
    assert 0 < relative_error(checkpoint, None, expected) < tolerance


@pytest.mark.parametrize(("method", "tolerance"), [("qspec_int8", 0.04), ("qspec_int4", 0.3)])
def test_rounding_at_loading_keeps_the_logits_of_the_source(
    source: Path, expected: torch.Tensor, method: str, tolerance: float
) -> None:
    assert 0 < relative_error(source, method, expected) < tolerance
