"""Computes a function for some rows only, as the device makes it cheapest.

A CPU computes the function for these rows alone. On other devices their number is not known without
a synchronisation of the host. There the function runs on all rows, and a mask chooses the results.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, where

Rows = Tensor | slice
"""Index of some rows: int64 [n], or all rows as a slice."""


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
    """Whether the rows of a mask are picked out, which reads the mask on the host."""
    return mask.device.type == "cpu"
