"""Compares the stand-ins for sgl_kernel with the real functions, where the real ones load."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmark.gpu_check import standin
from benchmark.gpu_check.outcome import NotHereError

SHAPE = (33, 256)


def module() -> ModuleType:
    """The package of stand-ins, under a name that does not hide the real one."""
    name = "gpu_check_sgl_kernel"
    if name not in sys.modules:
        path = standin.FOLDER / "sgl_kernel" / "__init__.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def calls(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[Any], list[Tensor]]]:
    """By the name of a function: a call of the function in a given module; returns its results."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows, weight, residual = normal(*SHAPE), normal(SHAPE[1]), normal(*SHAPE)
    probs = torch.softmax(torch.randn(9, 500, generator=generator) * 3, -1).to(device)
    outputs = normal(7, 4, 64), normal(7, 4, 64)
    logs = [torch.randn(7, 4, generator=generator).to(device) for _ in range(2)]

    def added(name: str) -> Callable[[Any], list[Tensor]]:
        def call(kernels: Any) -> list[Tensor]:
            both = [rows.clone(), residual.clone()]
            getattr(kernels, name)(*both, weight, 1e-5)
            return both

        return call

    def of_rows(name: str, *more: Any) -> Callable[[Any], list[Tensor]]:
        return lambda kernels: [getattr(kernels, name)(rows.clone(), *more)]

    ks = torch.tensor([1, 5, 500], dtype=torch.int32, device=device).repeat(3)
    ps = torch.tensor([0.5, 0.9, 1.0], device=device).repeat(3)
    return {
        "rmsnorm": of_rows("rmsnorm", weight, 1e-5),
        "gemma_rmsnorm": of_rows("gemma_rmsnorm", weight, 1e-5),
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


def compare(device: torch.device) -> str:
    """Stand-ins and real functions agree, in bfloat16."""
    if device.type != "cuda":
        raise NotHereError("the real functions need a GPU; test/benchmark compares with torch")
    if (error := standin.import_error()) is not None:
        raise NotHereError(f"the real functions do not load: {error}")
    import sgl_kernel

    wrong = []
    for name, call in calls(device, torch.bfloat16).items():
        for ours, theirs in zip(call(module()), call(sgl_kernel), strict=True):
            if not torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2):
                wrong.append(name)
    assert not wrong, f"stand-ins differ from sgl_kernel: {', '.join(wrong)}"
    return "stand-ins agree with sgl_kernel"
