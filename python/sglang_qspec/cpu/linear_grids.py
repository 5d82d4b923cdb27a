"""Integer grids of a weight, before packing: rounding a weight to a grid, and dequantizing it.

A weight is [N, K]: N output channels and K inputs. `dequantize` returns the exact weight of a grid,
so a test can compare a packed product with the product of this weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDED_ROWS = 4096
"""Output channels that `round_int8` rounds at once."""
_SHRINKS = tuple(1.0 - 0.04 * step for step in range(9))
"""Widths of a grid that `round_int4` tries, as shares of the range of values in the group."""


@dataclass(frozen=True)
class Grid:
    """The weight (q - zero) * scale, with a scale and a zero for each group of adjacent inputs."""

    q: Tensor
    """uint8 or int8 [N, K]: the integers."""
    scale: Tensor
    """float32 [N, G]: scale of each group; the number of groups G divides K."""
    zero: Tensor
    """float32 [N, G]: the value of `q` that stands for weight 0, for each group."""

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [N, K]."""
        n, k = self.q.shape
        q = self.q.view(n, -1, self.group_size).float()
        return (q - self.zero[..., None]).mul_(self.scale[..., None]).view(n, k)

    def per_channel(self) -> Grid:
        """Return the symmetric int8 grid with one scale per channel.

        It is exact if this grid has one integer zero and one scale per channel, and if q - zero
        fits int8. Otherwise the weight is rounded again, with an error of at most 1/254 of the
        largest absolute value in its channel.
        """
        if self.q.dtype == torch.int8 and self.scale.shape[1] == 1 and not bool(self.zero.any()):
            return self
        zero = self.zero[:, :1]
        if bool((self.zero == zero).all()) and bool((self.scale == self.scale[:, :1]).all()):
            q = self.q.short() - zero.short()
            whole = bool((zero == zero.round()).all())
            if whole and int(q.min()) >= -128 and int(q.max()) <= 127:
                return Grid(q.to(torch.int8), self.scale[:, :1], torch.zeros_like(zero))
        return round_int8(self.dequantize())


def round_int8(weight: Tensor) -> Grid:
    """Round `weight` [N, K] to nearest on a symmetric grid, -127..127, one scale per channel."""
    q = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), 1, dtype=torch.float32)  # SGLang sets another default
    for first in range(0, len(weight), _ROUNDED_ROWS):  # in blocks, as an LM head is large
        rows = slice(first, first + _ROUNDED_ROWS)
        block = weight[rows].float()
        tiny = torch.finfo(torch.float32).tiny
        scale[rows] = block.abs().amax(1, keepdim=True).div_(127).clamp_min_(tiny)
        q[rows] = (block / scale[rows]).round_().to(torch.int8)
    return Grid(q, scale, torch.zeros_like(scale))


def round_int4(weight: Tensor, group_size: int) -> Grid:
    """Round `weight` [N, K] to nearest in 0..15, with a scale and a zero for each group.

    `group_size` inputs form a group; it must divide K. The tried grids cover from 100 % down to
    68 % of a group's range, and the grid with the least squared error is chosen. With 15 steps, a
    finer step often outweighs the error of clipped weights.
    """
    n, k = weight.shape
    groups = weight.float().view(n, k // group_size, group_size)
    low = groups.amin(-1, keepdim=True).clamp_max_(0)
    high = groups.amax(-1, keepdim=True).clamp_min_(0)
    best = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / 15)).clamp_min_(torch.finfo(torch.float32).tiny)
        zero = (-low * shrink / scale).round_()
        error = (groups / scale + zero).round_().clamp_(0, 15).sub_(zero).mul_(scale).sub_(groups)
        error = error.square_().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    q = (groups / best_scale + best_zero).round_().clamp_(0, 15).to(torch.uint8)
    return Grid(q.view(n, k), best_scale[..., 0], best_zero[..., 0])
