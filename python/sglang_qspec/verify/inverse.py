"""Draws by inverting the cumulative distribution, with numbers from torch's global generator."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_columns(weights: Tensor) -> Tensor:
    """Draw a column of each row of `weights` [N, R] >= 0, in proportion to them: int64 [N]."""
    # float64, because uniform numbers in float32 have only 2**24 values.
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    point = torch.rand(total.shape, dtype=torch.float64, device=total.device) * total
    # A point that is rounded up to the total would be beyond the last possible column.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, point, right=True).squeeze(1)
