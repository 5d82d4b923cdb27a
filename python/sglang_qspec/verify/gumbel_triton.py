"""The seeded arg max of `gumbel_argmax` as one Triton kernel, for GPUs.

The kernel reads the weights once and keeps no [n, m] values in memory. A program searches a part of
one row, block by block. It knows the value of the row's likeliest column. So a bound in float32 can
skip the logarithms in float64 for nearly all blocks. Consumer GPUs have few float64 units.

The tests run this kernel in Triton's interpreter on a CPU, and `gpu-check` runs it on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of columns that a program handles at once."""
PART = 16
"""Number of blocks that one program searches."""

_SLACK = tl.constexpr(1 - 1e-5)
"""Safety factor for the bound, larger than its rounding error in float32."""
_LARGEST = tl.constexpr(1.7976931348623157e308)
"""Largest float64."""


def search(
    weights: Tensor, states: Tensor, guesses: Tensor, *, block: int = BLOCK, part: int = PART
) -> Tensor:
    """Return the column with the largest weight / E of each row: int64 [n].

    `weights` are float32 [n, m] >= 0, `states` int64 [n] from `seeded.hash_state`. `guesses` int64
    [n] are columns with a positive weight, ideally the likeliest. A row with NaN gives its guess.
    A program searches `part` blocks of `block` columns, a power of two.
    """
    rows, columns = weights.shape
    weights = weights.contiguous()
    parts = triton.cdiv(columns, block * part)
    values = torch.empty(rows, parts, dtype=torch.float64, device=weights.device)
    found = torch.empty(rows, parts, dtype=torch.int64, device=weights.device)
    if rows:
        _search[(rows, parts)](
            weights, states, guesses, values, found, columns, block=block, part=part
        )
    return found.gather(1, values.argmax(1, keepdim=True)).squeeze(1)


@triton.jit
def _search(
    weights, states, guesses, values, found, columns, block: tl.constexpr, part: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    state = tl.load(states + row).to(tl.uint32)
    best_column = tl.load(guesses + row)
    best = tl.load(weights + row * columns + best_column).to(tl.float64)
    best = best / _exponential(_hash(state, best_column.to(tl.uint32)))
    for step in range(part):
        column = (place * part + step) * block + tl.arange(0, block)
        weight = tl.load(weights + row * columns + column, mask=column < columns, other=0.0)
        hashed = _hash(state, column.to(tl.uint32))
        # 1 - u in steps of 2**-24, rounded down.
        rest = ((hashed ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32)
        bound = rest * (best * 5.9604644775390625e-08 * _SLACK).to(tl.float32)
        possible = (bound <= weight) & (weight > 0)
        if tl.max(possible.to(tl.int32), axis=0) > 0:
            value = tl.where(possible, weight.to(tl.float64) / _exponential(hashed), -1.0)
            highest = tl.max(value, axis=0)
            lowest = tl.min(tl.where(value == highest, column, 0x7FFFFFFF), axis=0).to(tl.int64)
            better = (highest > best) | ((highest == best) & (lowest < best_column))
            best_column = tl.where(better, lowest, best_column)
            best = tl.where(better, highest, best)
    result = row * tl.num_programs(1) + place
    tl.store(values + result, best)
    tl.store(found + result, best_column)


@triton.jit
def _hash(state, column):
    """Mix uint32 columns into a state, as `seeded.murmur_hash32` does."""
    word = column * 0xCC9E2D51
    word = (word << 15) | (word >> 17)
    value = state ^ (word * 0x1B873593)
    value = (value << 13) | (value >> 19)
    value = value * 5 + 0xE6546B64
    value = value ^ 16
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _exponential(hashed):
    """Return E in float64; E is exponential, and `seeded.gumbel` is -log(E)."""
    value = -tl.log(hashed.to(tl.float64) / 4294967295.0)
    return tl.minimum(tl.maximum(value, 2.3283064365386963e-10), _LARGEST)
