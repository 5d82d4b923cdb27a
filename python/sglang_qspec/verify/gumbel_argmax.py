"""Seeded draws from a whole vocabulary, fast on a CPU.

The Gumbel maximum over log-weights is the winner of a race: with E = -log(u) for the hashed
uniform number u of a column, the column of the largest weight / E. As E >= 1 - u, a column whose
weight / (1 - u) is less than what the likeliest column has, cannot win. That bound takes a few
vectorised operations on hash and weight, and leaves so few columns that logarithms cost nothing.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.seeded import hash_state

_SLACK = np.float32(1 - 1e-5)
"""More than what rounding to float32 can do to the bound."""


def gumbel_argmax(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a column of each row of `weights` float32 [n, m] >= 0, on a CPU: int64 [n].

    It is the column that `multinomial_with_seed` of SGLang's sampler draws from the same weights
    with `seeds` and `positions` int [n].
    """
    rows: NDArray[np.float32] = weights.numpy()
    states = hash_state(seeds, positions).numpy().astype(np.uint32)
    favourites = likeliest(weights).tolist()
    track = _Track(rows.shape[1])
    winners = [
        track.run(row, state, favourite)
        for row, state, favourite in zip(rows, states, favourites, strict=True)
    ]
    return torch.tensor(winners, dtype=torch.int64)


class _Track:
    """Buffers for races over so many columns."""

    def __init__(self, columns: int) -> None:
        self._words = _words(columns)
        self._hash = np.empty(columns, np.uint32)
        self._spare = np.empty(columns, np.uint32)
        self._bound = np.empty(columns, np.float32)
        self._hopeful = np.empty(columns, np.bool_)

    def run(self, weights: NDArray[np.float32], state: np.uint32, favourite: int) -> int:
        """The column that wins; `favourite` is one of positive weight, preferably a likely one."""
        self._mix(state)
        pace = float(weights[favourite]) / float(_times(self._hash[favourite]))
        # 1 - u in steps of 2**-24, rounded down.
        np.invert(self._hash, out=self._spare)
        np.right_shift(self._spare, np.uint32(8), out=self._spare)
        np.copyto(self._bound, self._spare.view(np.int32))  # signed ones convert faster
        np.multiply(self._bound, np.float32(pace * 2.0**-24) * _SLACK, out=self._bound)
        np.less_equal(self._bound, weights, out=self._hopeful)
        columns = np.flatnonzero(self._hopeful)
        part = weights[columns]
        columns, part = columns[part > 0], part[part > 0]
        if not len(columns):  # of a row that is not a number there is no draw
            return favourite
        return int(columns[(part / _times(self._hash[columns])).argmax()])

    def _mix(self, state: np.uint32) -> None:
        """Hash all columns, as `seeded.murmur_hash32` does, in place."""
        value, spare = self._hash, self._spare
        np.bitwise_xor(self._words, state, out=value)
        np.left_shift(value, np.uint32(13), out=spare)
        np.right_shift(value, np.uint32(19), out=value)
        np.bitwise_or(value, spare, out=value)
        np.multiply(value, np.uint32(5), out=value)
        np.add(value, np.uint32(0xE6546B64), out=value)
        np.bitwise_xor(value, np.uint32(16), out=value)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            np.right_shift(value, np.uint32(shift), out=spare)
            np.bitwise_xor(value, spare, out=value)
            np.multiply(value, np.uint32(factor), out=value)
        np.right_shift(value, np.uint32(16), out=spare)
        np.bitwise_xor(value, spare, out=value)


def _times(hashes: NDArray[np.uint32] | np.uint32) -> NDArray[np.float64]:
    """E of the module's description; `seeded.gumbel` is -log of it."""
    with np.errstate(divide="ignore"):  # the log of 0
        times = -np.log(hashes / np.float64(0xFFFFFFFF))
    return np.clip(times, 2.0**-32, np.finfo(np.float64).max)


@cache
def _words(columns: int) -> NDArray[np.uint32]:
    """What each column contributes to its hash."""
    words = np.arange(columns, dtype=np.uint32) * np.uint32(0xCC9E2D51)
    words = (words << np.uint32(15)) | (words >> np.uint32(17))
    return words * np.uint32(0x1B873593)
