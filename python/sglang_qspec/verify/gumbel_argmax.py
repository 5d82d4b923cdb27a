"""Seeded draws from a whole vocabulary: the arg max of log weight plus hashed Gumbel noise.

The arg max of log(weight) + Gumbel noise is the column with the largest value weight / E, where
E = -log(u) for the hashed uniform number u of a column. As E >= 1 - u, the value is at most
weight / (1 - u). A column where this bound is below the value of the likeliest column is not the
arg max. The bound takes a few vectorised operations, and few columns remain that need a logarithm.

Both functions are operators of torch with one implementation for each kind of device: numpy on a
CPU, and one fused Triton kernel on a GPU (`gumbel_triton`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, where

from sglang_qspec.verify.filters import any_filter, kept_ranks
from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.seeded import hash_state

_SLACK = np.float32(1 - 1e-5)
"""Safety factor for the bound, larger than its rounding error in float32."""


def gumbel_argmax(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one column for each row of `weights` float [n, m] >= 0: int64 [n].

    `multinomial_with_seed` of SGLang's sampler draws the same columns from the same weights, with
    the same `seeds` and `positions` int [n]. All tensors are on one device.
    """
    drawn: Tensor = torch.ops.sglang_qspec.gumbel_argmax(
        weights.float(), _words64(seeds), positions.long(), likeliest(weights)
    )
    return drawn


class Ranking(NamedTuple):
    """The largest weights of n rows, and the filters, which keep a beginning of the ranks."""

    weights: Tensor
    """float32 [n, R], in falling order."""
    columns: Tensor
    """int64 [n, R]"""
    top_ks: Tensor
    """int [n]: the number of columns or more keeps all."""
    top_ps: Tensor
    """float32 [n]"""
    min_ps: Tensor
    """float32 [n]"""


def gumbel_argmax_kept(
    weights: Tensor, ranking: Ranking, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Like `gumbel_argmax` among the columns that the filters keep: int64 [n].

    Rows without a filter are drawn from `weights`. The ranks must include all that a filter keeps.
    """
    drawn: Tensor = torch.ops.sglang_qspec.gumbel_argmax_kept(
        weights.float(), *ranking, _words64(seeds), positions.long()
    )
    return drawn


def _words64(seeds: Tensor) -> Tensor:
    return seeds.view(torch.int64) if seeds.dtype == torch.uint64 else seeds.long()


def _search_on_cpu(weights: Tensor, seeds: Tensor, positions: Tensor, guesses: Tensor) -> Tensor:
    rows: NDArray[np.float32] = weights.numpy()
    search = _Search(rows.shape[1])
    states = hash_state(seeds, positions).numpy().astype(np.uint32)
    columns = [
        search.run(row, state, guess)
        for row, state, guess in zip(rows, states, guesses.tolist(), strict=True)
    ]
    return torch.tensor(columns, dtype=torch.int64)


def _search_kept_on_cpu(
    weights: Tensor,
    ranked: Tensor,
    columns: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    kept = where(kept_ranks(ranked, top_ks, top_ps, min_ps), ranked, 0.0)
    filtered = any_filter(weights.shape[1], top_ks, top_ps, min_ps)
    among = torch.zeros_like(weights).scatter_(1, columns, kept)
    among = where(filtered.unsqueeze(1), among, weights)
    return _search_on_cpu(among, seeds, positions, columns[:, 0])


def _search_on_cuda(weights: Tensor, seeds: Tensor, positions: Tensor, guesses: Tensor) -> Tensor:
    from sglang_qspec.verify import gumbel_triton  # needs Triton, which a CPU does not

    return gumbel_triton.search(weights, seeds, positions, guesses)


def _search_kept_on_cuda(*given: Tensor) -> Tensor:
    from sglang_qspec.verify import gumbel_triton  # needs Triton, which a CPU does not

    return gumbel_triton.search_kept(*given)


def _shape(weights: Tensor, *_: Tensor) -> Tensor:
    return torch.empty(len(weights), dtype=torch.int64, device=weights.device)


_LIBRARY = torch.library.Library("sglang_qspec", "DEF")
_LIBRARY.define(
    "gumbel_argmax(Tensor weights, Tensor seeds, Tensor positions, Tensor guesses) -> Tensor"
)
_LIBRARY.define(
    "gumbel_argmax_kept(Tensor weights, Tensor ranked, Tensor columns, Tensor top_ks, "
    "Tensor top_ps, Tensor min_ps, Tensor seeds, Tensor positions) -> Tensor"
)
for _name, _on_cpu, _on_cuda in (
    ("gumbel_argmax", _search_on_cpu, _search_on_cuda),
    ("gumbel_argmax_kept", _search_kept_on_cpu, _search_kept_on_cuda),
):
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    torch.library.register_fake(f"sglang_qspec::{_name}", _shape, lib=_LIBRARY)


class _Search:
    """The arg max search over a fixed number of columns, with reusable buffers."""

    def __init__(self, columns: int) -> None:
        self._words = _words(columns)
        self._hash = np.empty(columns, np.uint32)
        self._spare = np.empty(columns, np.uint32)
        self._bound = np.empty(columns, np.float32)
        self._possible = np.empty(columns, np.bool_)

    def run(self, weights: NDArray[np.float32], state: np.uint32, guess: int) -> int:
        """Return the arg max. `guess` is a column with a positive weight, ideally the likeliest."""
        self._mix(state)
        value = float(weights[guess]) / float(_exponential(self._hash[guess]))
        # 1 - u in steps of 2**-24, rounded down.
        np.invert(self._hash, out=self._spare)
        np.right_shift(self._spare, np.uint32(8), out=self._spare)
        np.copyto(self._bound, self._spare.view(np.int32))  # signed integers convert faster
        np.multiply(self._bound, np.float32(value * 2.0**-24) * _SLACK, out=self._bound)
        np.less_equal(self._bound, weights, out=self._possible)
        columns = np.flatnonzero(self._possible)
        part = weights[columns]
        columns, part = columns[part > 0], part[part > 0]
        if not len(columns):  # the row holds NaN, so no draw is right
            return guess
        return int(columns[(part / _exponential(self._hash[columns])).argmax()])

    def _mix(self, state: np.uint32) -> None:
        """Hash all columns into `_hash`, as `seeded.murmur_hash32` does."""
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


def _exponential(hashes: NDArray[np.uint32] | np.uint32) -> NDArray[np.float64]:
    """Return E of the module's docstring; E is exponential, and `seeded.gumbel` is -log(E)."""
    with np.errstate(divide="ignore"):  # the log of 0
        values = -np.log(hashes / np.float64(0xFFFFFFFF))
    return np.clip(values, 2.0**-32, np.finfo(np.float64).max)


@cache
def _words(columns: int) -> NDArray[np.uint32]:
    """The part of each column's hash that depends on the column alone, uint32 [columns]."""
    words = np.arange(columns, dtype=np.uint32) * np.uint32(0xCC9E2D51)
    words = (words << np.uint32(15)) | (words >> np.uint32(17))
    return words * np.uint32(0x1B873593)
