"""After a CPU server loads new weights in place, no old weight remains."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from sglang_qspec.engine.cpu import dense_linear
from sglang_qspec.engine.cpu.quantized_layers import LmHead
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.loading import DraftModelOptions
from sglang_qspec.tools.models import DemoModels
from test.forked import run
from test.random_llama import write_random_llama

PROMPT = list(range(1000, 1020))


def logits_of(paths: list[str], dtype: str) -> list[list[float]]:
    """The logits after PROMPT of one model that loads the weights of each path in turn."""
    model = DraftModel(
        DraftModelOptions(
            paths[0], device="cpu", dtype=dtype, max_total_tokens=256, context_len=128, rows=4
        )
    )
    logits = []
    for path in paths:
        done, message = model._runner.weight_updater.update_weights_from_disk(path, "auto")
        assert done, message
        logits.append(model.extend([model.rows.open()], [PROMPT])[0].tolist())
    return logits


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_other_weights_replace_all_of_the_old_ones(
    models: DemoModels, tmp_path: Path, dtype: str, error: float
) -> None:
    """Layers, norms, the embedding table and the head tied to it; then the first weights again."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    first = write_random_llama(
        tmp_path / "first", models, hidden_size=128, intermediate_size=192, **sizes
    )
    second = write_random_llama(
        tmp_path / "second", models, hidden_size=128, intermediate_size=192, **sizes
    )
    other = LlamaForCausalLM.from_pretrained(second)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    other.save_pretrained(second)
    found = torch.tensor(run(logits_of, [str(first), str(second), str(first)], dtype))
    for path, logits in zip((first, second, first), found, strict=True):
        model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            expected = model(torch.tensor([PROMPT])).logits[0, -1]
        assert float((logits - expected).norm() / expected.norm()) < error
    assert float((found[1] - found[0]).norm() / found[0].norm()) > 0.3


def test_a_quantized_head_is_packed_again_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load writes through `Parameter.data`, which changes no version of the weight."""
    weight = torch.nn.Parameter(torch.randn(64, 32), requires_grad=False)
    head: Any = SimpleNamespace(weight=weight)
    hidden, method = torch.randn(1, 32), LmHead()
    first = method.apply(head, hidden)
    weight.data.mul_(2.0)
    monkeypatch.setattr(dense_linear, "_load_count", dense_linear.load_count() + 1)
    torch.testing.assert_close(method.apply(head, hidden), 2.0 * first)
