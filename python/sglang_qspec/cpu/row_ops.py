"""The operations of a target's decoder layer other than its products, compiled.

With few tokens per pass, the dispatch of torch calls takes as long as the matrix products. Each
result depends on its own row only, so passes of any shape compute the same. Sums are in float32.
`can_run` says whether the functions take a tensor; they do not check it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_qspec.cpu.native import native

LANES = 16
"""Widths must be multiples of this."""


def can_run(rows: Tensor, *widths: int) -> bool:
    """Whether the compiled operations support the dtype of `rows`, and these widths."""
    return (
        native() is not None
        and rows.dtype in (torch.bfloat16, torch.float32)
        and rows.device.type == "cpu"
        and all(width % LANES == 0 for width in widths)
    )


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of contiguous `rows` [n, width]; `weight` is float32 [width or more]."""
    out = torch.empty_like(rows)
    native().rms_norm(
        rows.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *rows.shape,
        eps,
        rows.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return the SiLU of the first half of contiguous `gate_up` [n, 2m] times its second half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    native().silu_and_mul(
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        gate_up.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def rotate_(heads: Tensor, cos_sin: Tensor) -> None:
    """Apply the rotary embedding in place, in half-split (neox) form.

    `heads` [n, heads, dim] may be part of longer rows. `cos_sin` float32 [n, dim], contiguous,
    holds the cosines of all angles and then their sines.
    """
    count, number, dim = heads.shape
    native().rotate(
        heads.data_ptr(),
        count,
        heads.stride(0),
        number,
        dim,
        cos_sin.data_ptr(),
        heads.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def store_rows(rows: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Copy `rows` [n, heads, dim] to the `slots` int64 [n] of `pool` [slots, heads, dim].

    Rows may be part of longer ones; all three have one dtype, and `pool` and `slots` are
    contiguous.
    """
    count, heads, dim = rows.shape
    native().store_rows(
        rows.data_ptr(),
        count,
        rows.stride(0),
        heads * dim,
        slots.data_ptr(),
        pool.data_ptr(),
        rows.dtype == torch.bfloat16,
    )
