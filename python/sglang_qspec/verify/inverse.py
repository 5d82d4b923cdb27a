"""Draws by the inverse of the distribution function, with numbers from torch's global generator."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_columns(weights: Tensor) -> Tensor:
    """Draw a column of each row of `weights` [N, R] >= 0 in proportion to its weight: int64 [N]."""
    # In float64, so that 2**-24 steps do not show.
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    point = torch.rand(total.shape, dtype=torch.float64, device=total.device) * total
    # The last step below keeps a point that was rounded up to the total on a possible column.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, point, right=True).squeeze(1)
