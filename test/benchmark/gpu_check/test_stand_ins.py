"""The stand-ins for sgl_kernel compute what torch computes, and SGLang imports them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from benchmark.harness import standin

ROOT = Path(__file__).parents[3]


def stand_ins() -> ModuleType:
    """The package of stand-ins, under a name that does not hide the real one."""
    path = standin.FOLDER / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("gpu_check_sgl_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KERNELS = stand_ins()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS, WEIGHT, RESIDUAL = normal(33, 256), normal(256, seed=1), normal(33, 256, seed=2)
GATE, UP = ROWS.chunk(2, -1)
SUM = ROWS + RESIDUAL
IN_TORCH = {
    "rmsnorm": [rms_norm(ROWS, (256,), WEIGHT, 1e-5)],
    "gemma_rmsnorm": [rms_norm(ROWS, (256,), 1 + WEIGHT, 1e-5)],
    "fused_add_rmsnorm": [rms_norm(SUM, (256,), WEIGHT, 1e-5), SUM],
    "gemma_fused_add_rmsnorm": [rms_norm(SUM, (256,), 1 + WEIGHT, 1e-5), SUM],
    "silu_and_mul": [silu(GATE) * UP],
    "gelu_and_mul": [gelu(GATE) * UP],
    "gelu_tanh_and_mul": [gelu(GATE, approximate="tanh") * UP],
}
"""Results by torch of the calls with these names, in float32."""


def calls(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[Any], list[Tensor]]]:
    """By the name of a function: a call of the function in a given module; returns its results."""

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    probs = torch.softmax(normal(9, 500) * 3, -1).to(device)
    outputs = there(normal(7, 4, 64)), there(normal(7, 4, 64, seed=1))
    logs = normal(7, 4).to(device), normal(7, 4, seed=1).to(device)

    def added(name: str) -> Callable[[Any], list[Tensor]]:
        def call(kernels: Any) -> list[Tensor]:
            both = [there(ROWS).clone(), there(RESIDUAL).clone()]
            getattr(kernels, name)(*both, there(WEIGHT), 1e-5)
            return both

        return call

    def of_rows(name: str, *more: Any) -> Callable[[Any], list[Tensor]]:
        return lambda kernels: [getattr(kernels, name)(there(ROWS).clone(), *more)]

    ks = torch.tensor([1, 5, 500], dtype=torch.int32, device=device).repeat(3)
    ps = torch.tensor([0.5, 0.9, 1.0], device=device).repeat(3)
    return {
        "rmsnorm": of_rows("rmsnorm", there(WEIGHT), 1e-5),
        "gemma_rmsnorm": of_rows("gemma_rmsnorm", there(WEIGHT), 1e-5),
        "fused_add_rmsnorm": added("fused_add_rmsnorm"),
        "gemma_fused_add_rmsnorm": added("gemma_fused_add_rmsnorm"),
        "silu_and_mul": of_rows("silu_and_mul"),
        "gelu_and_mul": of_rows("gelu_and_mul"),
        "gelu_tanh_and_mul": of_rows("gelu_tanh_and_mul"),
        "top_k_renorm_prob": lambda kernels: [kernels.top_k_renorm_prob(probs, ks)],
        "top_p_renorm_prob": lambda kernels: [kernels.top_p_renorm_prob(probs, ps)],
        "merge_state_v2": lambda kernels: list(
            kernels.merge_state_v2(outputs[0], logs[0], outputs[1], logs[1])
        ),
    }


@pytest.mark.parametrize("name", IN_TORCH)
def test_a_norm_or_activation_is_that_of_torch(name: str) -> None:
    call = calls(torch.device("cpu"), torch.float32)[name]
    torch.testing.assert_close(call(KERNELS), IN_TORCH[name])


def test_a_result_keeps_its_dtype_and_goes_to_a_given_tensor() -> None:
    out = torch.empty_like(ROWS)
    assert KERNELS.rmsnorm(ROWS, WEIGHT, 1e-5, out=out) is out
    torch.testing.assert_close(out, IN_TORCH["rmsnorm"][0])
    assert KERNELS.rmsnorm(ROWS.bfloat16(), WEIGHT.bfloat16(), 1e-5).dtype == torch.bfloat16
    half = torch.empty_like(UP)
    KERNELS.gelu_tanh_and_mul(ROWS, half)
    torch.testing.assert_close(half, IN_TORCH["gelu_tanh_and_mul"][0])


def test_the_filters_keep_the_likeliest_tokens() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.05, 0.6, 0.1]])
    kept = KERNELS.top_k_renorm_prob(probs, torch.tensor([2, 4], dtype=torch.int32))
    expected = torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7], [0.25, 0.05, 0.6, 0.1]])
    torch.testing.assert_close(kept, expected)
    kept = KERNELS.top_p_renorm_prob(probs, torch.tensor([0.5, 0.84]))
    expected = torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7], [5 / 17, 0.0, 12 / 17, 0.0]])
    torch.testing.assert_close(kept, expected)


def test_merged_attention_is_attention_over_both_parts() -> None:
    scores, values = normal(7, 4, 9), normal(7, 4, 9, 8, seed=1)

    def attend(first: int, last: int) -> tuple[Tensor, Tensor]:
        part = scores[..., first:last]
        return torch.softmax(part, -1).unsqueeze(2) @ values[..., first:last, :], part.logsumexp(-1)

    (first, first_logs), (rest, rest_logs) = attend(0, 5), attend(5, 9)
    whole, logs = attend(0, 9)
    merged = KERNELS.merge_state_v2(first.squeeze(2), first_logs, rest.squeeze(2), rest_logs)
    torch.testing.assert_close(merged[0], whole.squeeze(2))
    torch.testing.assert_close(merged[1], logs)
    empty = torch.full_like(logs, -torch.inf)
    alone = KERNELS.merge_state_v2(first.squeeze(2), first_logs, first.squeeze(2), empty)
    torch.testing.assert_close(alone[0], first.squeeze(2))
    neither = KERNELS.merge_state_v2(first.squeeze(2), empty, first.squeeze(2), empty)
    assert not neither[0].any()


@pytest.mark.gpu
def test_the_stand_ins_agree_with_sgl_kernel(device: torch.device) -> None:
    """In bfloat16, on a GPU where the real functions load."""
    if device.type != "cuda":
        pytest.skip("the real functions of sgl_kernel need a GPU (--device cuda)")
    if (error := standin.import_error()) is not None:
        pytest.skip(f"the real functions of sgl_kernel do not load: {error}")
    import sgl_kernel

    wrong = []
    for name, call in calls(device, torch.bfloat16).items():
        for ours, theirs in zip(call(KERNELS), call(sgl_kernel), strict=True):
            if not torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2):
                wrong.append(name)
    assert not wrong, f"stand-ins differ from sgl_kernel: {', '.join(wrong)}"


def test_the_comparison_with_the_real_functions_calls_every_stand_in() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for name, call in calls(torch.device("cpu"), dtype).items():
            assert all(values.isfinite().all() for values in call(KERNELS)), name
    public = {name for name, value in vars(KERNELS).items() if callable(value) and name[0] != "_"}
    public -= {"Tensor", "gelu", "silu", "weak_ref_tensor"}
    assert public == set(calls(torch.device("cpu"), torch.float32))


IMPORTED = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_name = lambda *_: "a mock"
torch.cuda.get_device_properties = lambda *_: type(
    "Properties", (), {"major": 9, "minor": 0, "multi_processor_count": 132}
)
import sgl_kernel
assert "standin" in sgl_kernel.__file__, sgl_kernel.__file__
from sglang.srt.utils import is_cuda
assert is_cuda()
from sglang.srt.layers import activation, layernorm, sampler
from sglang.srt.layers.attention import merge_state, triton_backend
from sglang.srt.layers.quantization import utils
from sglang.srt.model_executor.runner_backend_utils import weak_ref_tensor
from sglang.srt.model_executor import model_runner
from sglang.srt.models import llama
from sglang.kernels.ops.speculative import spec_tree, reconstruct_tree
from sglang.srt.managers import scheduler
from sglang.srt.entrypoints import http_server
from sglang_qspec.engine.passes import worker
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_int8
try:
    compressed_tensors_w8a8_int8.int8_scaled_mm(1)
except NotImplementedError as error:
    assert "sgl_kernel.int8_scaled_mm has no stand-in" in str(error)
else:
    raise AssertionError("a function without a stand-in did nothing")
"""


def test_sglangs_modules_for_a_dense_model_on_cuda_import_with_the_stand_ins() -> None:
    """In one new process, because SGLang keeps its platform; facts are mocked, no kernel runs."""
    variables = {**os.environ, **standin.environment()}
    variables["PYTHONPATH"] += os.pathsep + str(ROOT / "python")
    variables["SGLANG_USE_CPU_ENGINE"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_real_package_is_looked_for_without_the_stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "sgl_kernel"
    real.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(standin.FOLDER), str(tmp_path)]))
    (real / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    standin.import_error.cache_clear()
    assert standin.import_error() == "ImportError: undefined symbol: _ZN3c10"
    (real / "__init__.py").write_text("")
    standin.import_error.cache_clear()
    assert standin.import_error() is None
    standin.import_error.cache_clear()
    path = standin.environment()["PYTHONPATH"].split(os.pathsep)
    assert path == [str(standin.FOLDER), str(tmp_path)]


def test_another_function_of_sgl_kernel_is_a_clear_error() -> None:
    with pytest.raises(AttributeError, match=r"sgl_kernel\.fp8_scaled_mm has no stand-in"):
        _ = KERNELS.fp8_scaled_mm
