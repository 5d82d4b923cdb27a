"""Computes a function for some rows of a tensor, in the cheapest way for the device.

A CPU computes the function for the chosen rows alone. On other devices the host would have to
synchronise to learn the number of chosen rows. So the function runs on all rows there, and a mask
chooses the results.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, where

Rows = Tensor | slice
"""Index of some rows: int64 [n], or a slice for all rows."""


def fill(values: Tensor, mask: Tensor, function: Callable[[Rows], Tensor]) -> Tensor:
    """Return `values` [N, ...] with the results of `function` where `mask` bool [N] is true.

    `function` gets the index of rows, and returns their values [n, ...]. It must compute each row
    independently of the others, and must accept rows that the mask excludes.
    """
    if not picks(mask):
        shape = (-1, *(1,) * (values.dim() - 1))
        return where(mask.view(shape), function(slice(None)), values)
    rows = mask.nonzero()[:, 0]
    if len(rows) == len(mask):
        return function(slice(None))
    if not len(rows):
        return values
    values = values.clone()
    values[rows] = function(rows)
    return values


def picks(mask: Tensor) -> bool:
    """Whether `fill` computes only the chosen rows, for which the host must read the mask."""
    return mask.device.type == "cpu"
