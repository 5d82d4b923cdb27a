"""Tests whether counts agree with a distribution, by Pearson's chi-square."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

RARE = 5.0
"""Outcomes with smaller expected counts are pooled (Cochran's rule)."""


class Fit(NamedTuple):
    """Pearson's test of counts against a distribution."""

    statistic: float
    freedom: int
    p: float
    """Probability, under the distribution, of a statistic that is at least as large. It is 0 if an
    impossible outcome occurred."""


def fit(counts: Tensor, expected: Tensor) -> Fit:
    """Compare `counts` [n] with the probabilities `expected` float64 [n], which sum to 1."""
    hoped = expected.double() * counts.sum()
    seen = counts.double()
    rare = hoped < RARE
    if int(counts[expected == 0].sum()):
        return Fit(float("inf"), 1, 0.0)
    hoped = torch.cat((hoped[~rare], hoped[rare].sum().view(1)))
    seen = torch.cat((seen[~rare], seen[rare].sum().view(1)))
    possible = hoped > 0
    statistic = ((seen - hoped)[possible] ** 2 / hoped[possible]).sum()
    return _fit(float(statistic), int(possible.sum()) - 1)


def compare(ours: Mapping[Hashable, int], theirs: Mapping[Hashable, int]) -> Fit:
    """Test whether two samples, given as counts by outcome, can have one distribution."""
    sizes = sum(ours.values()), sum(theirs.values())
    scale = (sizes[1] / sizes[0]) ** 0.5
    pairs = {key: (ours.get(key, 0), theirs.get(key, 0)) for key in {*ours, *theirs}}
    common = [pair for pair in pairs.values() if sum(pair) >= 2 * RARE]
    rest = (sizes[0] - sum(a for a, _ in common), sizes[1] - sum(b for _, b in common))
    common += [rest] if sum(rest) else []
    statistic = sum((a * scale - b / scale) ** 2 / (a + b) for a, b in common)
    return _fit(statistic, len(common) - 1)


def _fit(statistic: float, freedom: int) -> Fit:
    freedom = max(freedom, 1)
    half, at = (torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, statistic))
    return Fit(statistic, freedom, float(torch.special.gammaincc(half, at)))


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic per degree of freedom, about 1 if `counts` [n] agree with `expected` [n].

    Raises AssertionError if an impossible outcome occurred.
    """
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    hoped = expected[possible] * counts.sum()
    freedom = max(int(possible.sum()) - 1, 1)
    return float(((counts[possible] - hoped) ** 2 / hoped).sum()) / freedom
