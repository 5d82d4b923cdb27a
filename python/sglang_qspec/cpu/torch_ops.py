"""The only `torch.ops.sgl_kernel` operator that SGLang calls on CPUs without AMX."""

from functools import cache

import torch
from torch import Tensor

from sglang_qspec.cpu.kernels import murmur_hash32_cpu


def _fake_murmur(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)


@cache
def register_torch_ops() -> torch.library.Library:
    """Register `sgl_kernel::murmur_hash32_cpu`; the registration lives as long as the process."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
    torch.library.register_fake("sgl_kernel::murmur_hash32_cpu", _fake_murmur, lib=library)
    return library
