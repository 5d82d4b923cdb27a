"""Draws with numbers from torch's global generator.

A CPU inverts the cumulative distribution. Other devices take the Gumbel maximum with random seeds,
which needs no cumulative sums of whole vocabularies in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_qspec.verify.gumbel_argmax import gumbel_argmax


def draw_columns(weights: Tensor) -> Tensor:
    """Draw a column of each row of `weights` [N, R] >= 0, in proportion to them: int64 [N]."""
    if weights.device.type != "cpu":
        return gumbel_argmax(weights, *random_seeds(weights))
    # float64, because uniform numbers in float32 have only 2**24 values.
    sums = weights.double().cumsum(-1)
    total = sums[:, -1:]
    point = torch.rand(total.shape, dtype=torch.float64, device=total.device) * total
    # A point that is rounded up to the total would be beyond the last possible column.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, point, right=True).squeeze(1)


def random_seeds(weights: Tensor) -> tuple[Tensor, Tensor]:
    """A random seed and a position for one draw from each row of `weights`: int64 [N] each."""
    seeds = torch.randint(2**63 - 1, (len(weights),), device=weights.device)
    return seeds, torch.zeros_like(seeds)
