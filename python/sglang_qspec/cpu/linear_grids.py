"""Integer grids of a weight, before any packing: rounding to a grid, and reading one back.

A weight is [N, K]: N output channels over K inputs. Every grid here is an exact function of the
numbers in it, so a test can compare a packed product with the float weight that `dequantize` gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Of the largest value in a group: what is worth trying as the end of its grid.
_SHRINKS = tuple(1.0 - 0.04 * step for step in range(9))


@dataclass(frozen=True)
class Grid:
    """`(q - zero) * scale`, with a scale and a zero for each group of neighbouring inputs."""

    q: Tensor
    """uint8 or int8 [N, K]."""
    scale: Tensor
    """float32 [N, G]; G divides K."""
    zero: Tensor
    """float32 [N, G], in steps of q."""

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.scale.shape[1]

    def dequantize(self) -> Tensor:
        """The weight that the grid stands for, float32 [N, K]."""
        n, k = self.q.shape
        q = self.q.view(n, -1, self.group_size).float()
        return (q - self.zero[..., None]).mul_(self.scale[..., None]).view(n, k)

    def per_channel(self) -> Grid:
        """The symmetric int8 grid with one scale per channel: exact if this grid is one already.

        Otherwise the dequantized weight is rounded again, by at most half of 1/127 of the largest
        value in its channel.
        """
        zero = self.zero[:, :1]
        if bool((self.zero == zero).all()) and bool((self.scale == self.scale[:, :1]).all()):
            q = self.q.short() - zero.short()
            whole = bool((zero == zero.round()).all())
            if whole and int(q.min()) >= -128 and int(q.max()) <= 127:
                return Grid(q.to(torch.int8), self.scale[:, :1], torch.zeros_like(zero))
        return round_int8(self.dequantize())


def round_int8(weight: Tensor) -> Grid:
    """Round to nearest in -127..127, symmetric, one scale per output channel."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
    q = (weight / scale).round_().to(torch.int8)
    return Grid(q, scale, torch.zeros_like(scale))


def round_int4(weight: Tensor, group_size: int) -> Grid:
    """Round to nearest in 0..15 with a zero, in groups of `group_size` inputs, which divides K.

    The ends of each group's grid are drawn in as far as that lowers the squared error, which for
    15 steps is worth more than keeping the largest weight.
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
