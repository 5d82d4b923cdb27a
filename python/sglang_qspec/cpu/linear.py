"""Matrix products with packed int8 and int4 weights on a CPU; the kernel depends on the row count.

A row is the input of one token. Measurements chose the kernel for each number of rows (one AVX-512
core, layers of a 135M-parameter model; "Packed matrix products" in docs/results.md):

- An int8 product (uint8 activations, int8 weights, int32 sums) is faster than packed bfloat16 at
  any number of rows. Memory bandwidth bounds the compiled product (`cpu/native/product.h`) for up
  to 4 rows. Without a compiled product, torch multiplies bfloat16 activations.
- With AMX the compiled product takes little longer for 16 rows, or 8 with two digits, than for one.
- 8-bit activations lower the agreement with the target. With few rows, reading the weight takes
  most of the time. So with few rows each activation becomes two 8-bit digits, in two rows: 16 bits
  are as accurate as float activations and take little more time. With AVX2 one digit has up to 15
  bits.
- An int4 weight has half the bytes, which is faster for up to 2 rows. The kernel's time grows with
  each row, so more rows use an int8 copy of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_qspec.cpu.linear_grids import Grid, round_int4, round_int8
from sglang_qspec.cpu.native import native

TWO_DIGIT_ROWS = 4
"""Maximum number of rows with two digits per activation."""
INT4_ROWS = 0 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 2
"""Maximum number of rows for the int4 kernel; more rows use the int8 copy. With AVX2 torch's kernel
is several times slower than the int8 product of one row."""
_INT4_GROUPS = (256, 128, 64, 32)
"""Group sizes of torch's int4 product, which also needs a multiple of 16 output channels."""


class Int8Linear:
    """The product x @ weight.T for an int8 weight with one scale per output channel."""

    def __init__(self, grid: Grid) -> None:
        grid = grid.per_channel()
        self.out_features, self.in_features = grid.q.shape
        self._scale = grid.scale[:, 0].contiguous()
        self.native: Any = None
        """The weight packed for `cpu._native`; None if this module is not available."""
        if native() is not None:
            self.native = native().PackedInt8(grid.q.numpy(), self._scale.numpy())
        else:
            self._q = grid.q

    @classmethod
    def quantize(cls, weight: Tensor) -> Int8Linear:
        """Round a float weight [N, K] to int8 and pack it."""
        return cls(round_int8(weight))

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` [..., K] of a float type and add `bias` [N]: [..., N] of the type of `x`."""
        rows = x.reshape(-1, self.in_features)
        if self.native is not None:
            few = rows.shape[0] <= TWO_DIGIT_ROWS
            digits = native().EXACT_DIGITS if few else 1
            floats = rows.float().contiguous().numpy()
            y = torch.from_numpy(self.native.multiply(floats, digits, torch.get_num_threads()))
        else:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self._q, self._scale.bfloat16())
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if bias is None else y.add_(bias)


class Int4Linear:
    """The product x @ weight.T for an int4 weight in groups.

    It also keeps an int8 copy for many rows, so it takes 12 bits per weight; with AVX2 it has the
    copy alone.
    """

    def __init__(self, grid: Grid) -> None:
        """Pack the weight. Raises ValueError unless `grid.q` is uint8 in 0..15."""
        if grid.q.dtype != torch.uint8 or int(grid.q.max()) > 15:
            raise ValueError(
                f"grid.q is {grid.q.dtype} up to {int(grid.q.max())}, but must be uint8 in 0..15"
            )
        self.out_features, self.in_features = grid.q.shape
        self._many_rows = Int8Linear(grid)
        self._packed: Tensor | None = None
        group = next((g for g in _INT4_GROUPS if grid.group_size % g == 0), None)
        if INT4_ROWS and group is not None and self.out_features % 16 == 0:
            self._group = group
            self._packed = torch._convert_weight_to_int4pack_for_cpu(grid.q.int(), 1)
            # The kernel computes (q - 8) * scale + offset.
            offset = (8 - grid.zero) * grid.scale
            repeats = grid.group_size // group
            steps = torch.stack([grid.scale, offset], -1).repeat_interleave(repeats, 1)
            self._steps = steps.transpose(0, 1).contiguous()

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int) -> Int4Linear:
        """Round a float weight [N, K] in groups of `group_size` inputs and pack it.

        `group_size` must divide K.
        """
        return cls(round_int4(weight, group_size))

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply `x` [..., K] of a float type and add `bias` [N]: [..., N] of the type of `x`."""
        rows = x.reshape(-1, self.in_features)
        if self._packed is None or rows.shape[0] > INT4_ROWS:
            return self._many_rows(x, bias)
        if self._steps.dtype != x.dtype:
            self._steps = self._steps.to(x.dtype)
        y = torch._weight_int4pack_mm_for_cpu(rows, self._packed, self._group, self._steps)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if bias is None else y.add_(bias)
