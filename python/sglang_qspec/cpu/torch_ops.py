"""The `torch.ops.sgl_kernel` operators that SGLang names on CPUs without a build of them."""

from functools import cache

import torch
from torch import Tensor

from sglang_qspec.cpu.kernels import murmur_hash32_cpu

_NAMED = (
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "rmsnorm_cpu",
)
"""Operators that SGLang's model files read while Python imports them, so that one missing name
leaves several families without a processor for images. They have no implementation: only Grok and
models with linear attention call them."""


def _fake_murmur(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)


def _sigmoid_mul_(values: Tensor, gate: Tensor) -> None:
    """Multiply `values` by the sigmoid of `gate`, in place."""
    values.mul_(gate.sigmoid())


@cache
def register_torch_ops() -> torch.library.Library:
    """Register the operators; the registration lives as long as the process."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
    torch.library.register_fake("sgl_kernel::murmur_hash32_cpu", _fake_murmur, lib=library)
    library.define("fused_sigmoid_mul_cpu(Tensor(a!) values, Tensor gate) -> ()")
    library.impl("fused_sigmoid_mul_cpu", _sigmoid_mul_, "CPU")
    for name in _NAMED:
        library.define(f"{name}(Tensor input) -> Tensor")
    return library
