"""Reading the integers of GPTQ and AWQ checkpoints, which are packed into int32.

Sources of the layouts: AutoGPTQ's `qlinear` modules, AutoAWQ's `WQLinear_GEMM`. auto-round exports
both. A grid is built per layer while a model loads, so what this reads is already sharded and
fused as the layer wants it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_qspec.cpu.linear_grids import Grid

# AWQ stores output channels 0 2 4 6 1 3 5 7 of each eight from the lowest bits up.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def read_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, *, bits: int, zeros_off_by_one: bool
) -> Grid:
    """The grid of one layer; bits is 4 or 8, and p = 32 / bits numbers share an int32.

    qweight: int32 [K / p, N]. qzeros: int32 [G, N / p]. scales: [G, N]. The first GPTQ format
    keeps each zero less one; `gptq_v2` keeps it as it is.
    """
    q = _unpack(qweight.T, bits)
    zero = _unpack(qzeros, bits).short()
    if zeros_off_by_one:
        zero = (zero + 1) & (2**bits - 1)
    return Grid(q.contiguous(), scales.T.float().contiguous(), zero.T.float().contiguous())


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Grid:
    """The grid of one 4-bit layer.

    qweight: int32 [K, N / 8]. qzeros: int32 [G, N / 8]. scales: [G, N].
    """
    q = _reorder(_unpack(qweight, 4))
    zero = _reorder(_unpack(qzeros, 4))
    return Grid(q.T.contiguous(), scales.T.float().contiguous(), zero.T.float().contiguous())


def in_order(g_idx: Tensor, groups: int) -> bool:
    """Does input i belong to group i // (K / groups)? Not so in act-order checkpoints."""
    k = g_idx.shape[0]
    if groups == 1:
        return True
    return torch.equal(g_idx.long(), torch.arange(k) // (k // groups))


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (packed[..., None] >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(1)


def _reorder(numbers: Tensor) -> Tensor:
    return numbers.view(numbers.shape[0], -1, 8)[..., _AWQ_ORDER].reshape(numbers.shape)
