"""Reads the integers of GPTQ and AWQ checkpoints, which are packed into int32.

The layouts are those of AutoGPTQ's `qlinear` modules and AutoAWQ's `WQLinear_GEMM`; auto-round
exports both. SGLang has already sharded and fused the tensors for the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_qspec.cpu.linear_grids import Grid

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each output channel in an int32: AWQ stores 0 2 4 6 1 3 5 7 from the lowest bits up."""


def read_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, *, bits: int, zeros_off_by_one: bool
) -> Grid:
    """Return the grid of one layer with `bits` 4 or 8; an int32 holds p = 32 / bits numbers.

    `qweight` is int32 [K / p, N], `qzeros` int32 [G, N / p] and `scales` [G, N]. The first GPTQ
    format stores each zero minus 1 (`zeros_off_by_one`); `gptq_v2` stores the zero itself.
    """
    q = _unpack(qweight.T, bits)
    zero = _unpack(qzeros, bits).short()
    if zeros_off_by_one:
        zero = (zero + 1) & (2**bits - 1)
    return Grid(q.contiguous(), scales.T.float().contiguous(), zero.T.float().contiguous())


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Grid:
    """Return the grid of one 4-bit layer.

    `qweight` is int32 [K, N / 8], `qzeros` int32 [G, N / 8] and `scales` [G, N].
    """
    q = _reorder(_unpack(qweight, 4))
    zero = _reorder(_unpack(qzeros, 4))
    return Grid(q.T.contiguous(), scales.T.float().contiguous(), zero.T.float().contiguous())


def in_order(g_idx: Tensor, groups: int) -> bool:
    """Whether input i belongs to group i // (K / groups); false for act-order checkpoints."""
    k = g_idx.shape[0]
    if groups == 1:
        return True
    return torch.equal(g_idx.long(), torch.arange(k) // (k // groups))


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [R, C] to uint8 [R, C * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (packed[..., None] >> shifts) & (2**bits - 1)
    return numbers.to(torch.uint8).flatten(1)


def _reorder(numbers: Tensor) -> Tensor:
    return numbers.view(numbers.shape[0], -1, 8)[..., _AWQ_ORDER].reshape(numbers.shape)
