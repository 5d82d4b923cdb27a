"""Which rows of a pass get which adapter on a CPU, against products of each row by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_qspec.engine.cpu.lora import CpuLoRA, _Unpinned, rows_of

RANKS = [2, 0, 3]
SCALINGS = [0.5, 1.0, 2.0]
INPUTS, OUTPUTS, WIDEST = 6, 8, 3


def batch(mode: ForwardMode, **fields: Any) -> Any:
    plain = {"forward_mode": mode, "batch_size": 3, "return_logprob": False}
    return SimpleNamespace(**{**plain, **fields})


def ragged(*lens: int) -> Any:
    layout = SimpleNamespace(verify_lens_cpu=list(lens))
    spec_info = SimpleNamespace(draft_token_num=max(lens), ragged_verify_layout=layout)
    return batch(ForwardMode.TARGET_VERIFY, spec_info=spec_info)


def even(width: int) -> Any:
    return batch(ForwardMode.TARGET_VERIFY, spec_info=SimpleNamespace(draft_token_num=width))


def prefill(*lens: int) -> Any:
    return batch(ForwardMode.EXTEND, extend_seq_lens_cpu=list(lens))


@pytest.mark.parametrize(
    ("forward_batch", "rows"),
    [
        (batch(ForwardMode.DECODE), [1, 1, 1]),
        (even(4), [4, 4, 4]),
        (ragged(1, 5, 2), [1, 5, 2]),
        (prefill(7, 1, 3), [7, 1, 3]),
        (batch(ForwardMode.IDLE), []),
    ],
)
def test_the_rows_of_each_request_are_counted(forward_batch: Any, rows: list[int]) -> None:
    assert rows_of(forward_batch) == rows


def backend() -> CpuLoRA:
    with _Unpinned():
        return CpuLoRA(max_loras_per_batch=3, device=torch.device("cpu"))


@pytest.mark.parametrize("forward_batch", [batch(ForwardMode.DECODE), even(2), ragged(1, 4, 2)])
def test_each_row_gets_the_adapter_of_its_request(forward_batch: Any) -> None:
    lora, requests = backend(), [2, 1, 0]
    lora.prepare_lora_batch(forward_batch, requests, RANKS, SCALINGS, False)
    rows = rows_of(forward_batch)
    owners = [adapter for adapter, count in zip(requests, rows, strict=True) for _ in range(count)]
    check(lora, owners)


def check(lora: CpuLoRA, owners: list[int], **options: Any) -> None:
    """Fail unless row i gets the adapter `owners[i]`."""
    torch.manual_seed(0)
    down = torch.randn(3, WIDEST, INPUTS)
    up = torch.randn(3, OUTPUTS, WIDEST)
    x, base = torch.randn(len(owners), INPUTS), torch.randn(len(owners), OUTPUTS)
    expected = base.clone()
    for row, adapter in enumerate(owners):
        rank = RANKS[adapter]
        product = up[adapter, :, :rank] @ (down[adapter, :rank] @ x[row])
        expected[row] += SCALINGS[adapter] * product
    inner = lora.run_lora_a_sgemm(x, down, **options)
    whole = torch.tensor([0, OUTPUTS])
    got = lora.run_lora_b_sgemm(inner, up, output_offset_cpu=whole, base_output=base, **options)
    torch.testing.assert_close(got, expected)


def test_the_lm_head_of_a_prefill_gets_the_last_row_of_each_request() -> None:
    lora = backend()
    lora.prepare_lora_batch(prefill(7, 2, 3), [2, 1, 0], RANKS, SCALINGS, False)
    pruned = lora.lm_head_batch_info
    assert pruned is not None
    assert pruned.expected_tokens == 3
    check(lora, [2, 1, 0], pruned_batch_info=pruned)


def test_a_verify_pass_prunes_no_rows_of_the_lm_head() -> None:
    lora = backend()
    lora.prepare_lora_batch(prefill(7, 2, 3), [2, 1, 0], RANKS, SCALINGS, False)
    lora.prepare_lora_batch(ragged(2, 1, 3), [2, 1, 0], RANKS, SCALINGS, False)
    assert lora.lm_head_batch_info is None


def test_layers_that_adapters_cannot_be_added_to_are_named() -> None:
    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o_proj = torch.nn.Module()

    with pytest.raises(ValueError, match="o_proj has quantized weights"):
        backend().validate_lora_targets(Quantized(), {"o_proj"})
    backend().validate_lora_targets(Quantized(), {"qkv_proj"})


def test_torch_pins_no_memory_while_layers_are_made() -> None:
    with _Unpinned():
        assert not torch.tensor([1], pin_memory=True).is_pinned()
        assert torch.ones(2).pin_memory().tolist() == [1, 1]
