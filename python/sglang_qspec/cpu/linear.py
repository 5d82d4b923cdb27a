"""Matrix products with packed int8 and int4 weights on a CPU; the kernel depends on the row count.

A row is the input of one token. Measurements chose the kernel for each number of rows (one AVX-512
core, layers of a 135M-parameter model; "Packed matrix products" in docs/results.md):

- An int8 product (uint8 activations, int8 weights, int32 sums) is faster than packed bfloat16 at
  any number of rows. Memory bandwidth bounds the compiled product (`cpu/native/product.h`) for up
  to 4 rows. Without VNNI, FBGEMM's product is the fastest in torch.
- With AMX the compiled product takes little longer for 16 rows, or 8 with two digits, than for one.
- 8-bit activations lower the agreement with the target. With few rows, reading the weight takes
  most of the time. So with few rows each activation becomes two 8-bit digits, in two rows: 16 bits
  are as accurate as float activations and take little more time.
- An int4 weight has half the bytes, which is faster for up to 2 rows. The kernel's time grows with
  each row, so more rows use an int8 copy of the weight.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sglang_qspec.cpu.linear_grids import Grid, round_int4, round_int8
from sglang_qspec.cpu.native import native

TWO_DIGIT_ROWS = 4
"""Maximum number of rows with two digits per activation."""
INT4_ROWS = 2
"""Maximum number of rows for the int4 kernel; more rows use the int8 copy."""
_BLOCK_ROWS = 64
"""Rows per call of FBGEMM: one call with 256 rows takes 1.2 times as long as four with 64."""
_INT4_GROUPS = (256, 128, 64, 32)
"""Group sizes of torch's int4 product, which also needs a multiple of 16 output channels."""
_TINY = 1e-30
"""Minimum step of a row of activations, so that a row of zeros does not divide by 0."""


@cache
def has_fbgemm() -> bool:
    """Whether this build of torch has FBGEMM (x86); without it activations stay in bfloat16."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def _digit() -> int:
    """Return the largest digit for which FBGEMM sums products exactly.

    Without VNNI FBGEMM sums two products in 16 bits, so a digit has only 7 bits.
    """
    return 127 if torch.cpu._is_vnni_supported() else 63


class Int8Linear:
    """The product x @ weight.T for an int8 weight with one scale per output channel."""

    def __init__(self, grid: Grid) -> None:
        grid = grid.per_channel()
        self.out_features, self.in_features = grid.q.shape
        self._scale = grid.scale[:, 0].contiguous()
        self.native: Any = None
        """The weight packed for `cpu._native`; None if this module is not available."""
        self._packed: Any = None
        if native() is not None:
            self.native = native().PackedInt8(grid.q.numpy(), self._scale.numpy())
        elif has_fbgemm():
            self._packed = _pack_fbgemm(grid.q, self._scale)
            self._sums = grid.q.sum(1, dtype=torch.float32).mul_(self._scale)
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
            digits = 2 if rows.shape[0] <= TWO_DIGIT_ROWS else 1
            floats = rows.float().contiguous().numpy()
            y = torch.from_numpy(self.native.multiply(floats, digits, torch.get_num_threads()))
        elif self._packed is None:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self._q, self._scale.bfloat16())
        elif rows.shape[0] <= TWO_DIGIT_ROWS:
            y = self._two_digits(rows.float())
        elif rows.shape[0] <= _BLOCK_ROWS:
            y = self._one_digit(rows.float())
        else:
            y = torch.cat([self._one_digit(block.float()) for block in rows.split(_BLOCK_ROWS)])
        y = y.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return y if bias is None else y.add_(bias)

    def _one_digit(self, x: Tensor) -> Tensor:
        """Multiply rows in 8 bits. The digits of a row cover its range: x = low + step * digit.

        `x` is float32 [M, K]; returns float32 [M, N].
        """
        # Not `aminmax`, which takes three times as long as both reductions.
        low = x.amin(-1, keepdim=True)
        step = x.amax(-1, keepdim=True).sub_(low).mul_(1 / (2 * _digit() + 1)).clamp_min_(_TINY)
        y = _multiply((x - low).div_(step), 0, self._packed)
        return y.mul_(step).addr_(low[:, 0], self._sums)

    def _two_digits(self, x: Tensor) -> Tensor:
        """Multiply rows in 16 bits: a digit, and a second digit for its rounding error.

        Both are rows of the same product. `x` is float32 [M, K]; returns float32 [M, N].
        """
        m, k = x.shape
        finer = 2 * _digit()
        step = x.abs().amax(-1, keepdim=True).mul_(1 / _digit()).clamp_min_(_TINY)
        digits = x.new_empty(2 * m, k)
        upper, lower = digits[:m], digits[m:]
        torch.div(x, step, out=lower)
        torch.round(lower, out=upper)
        lower.sub_(upper).mul_(finer)
        y = _multiply(digits, _digit() + 1, self._packed)
        return y[:m].add_(y[m:], alpha=1 / finer).mul_(step)


class Int4Linear:
    """The product x @ weight.T for an int4 weight in groups.

    It also keeps an int8 copy for many rows, so it takes 12 bits per weight.
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
        if group is not None and self.out_features % 16 == 0:
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


def _pack_fbgemm(q: Tensor, scale: Tensor) -> Any:
    """Return FBGEMM's packed copy of an int8 weight [N, K] with scales [N]."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # Quantized tensor types are deprecated; the pinned torch still has them.
            warnings.simplefilter("ignore", UserWarning)
            weight = torch._make_per_channel_quantized_tensor(
                q, scale.double(), torch.zeros(q.shape[0], dtype=torch.int64), 0
            )
            return torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = engine


def _multiply(digits: Tensor, zero: int, packed: Any) -> Tensor:
    """Multiply `digits` float32 [M, K], rounded to nearest, by a packed weight: float32 [M, N].

    With `zero` added, digits fit into bytes. This operator takes scale and zero point from its
    caller; `linear_dynamic` would compute one range for all rows together.
    """
    product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        digits, 1.0, zero, packed
    )
    return product
