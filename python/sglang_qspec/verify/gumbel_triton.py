"""The seeded arg max of `gumbel_argmax` as Triton kernels, for GPUs.

The kernels read the weights once and keep no [n, m] values in memory. A program searches a part of
one row, block by block. It knows the value of a likely column. So a bound in float32 can skip the
logarithms in float64 for nearly all blocks. Consumer GPUs have few float64 units.

Sizes are not specialised: a new size would compile a kernel again in the middle of serving.

The tests run these kernels in Triton's interpreter on a CPU, and `gpu-check` runs them on a GPU.
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
    weights: Tensor,
    seeds: Tensor,
    positions: Tensor,
    guesses: Tensor,
    *,
    block: int = BLOCK,
    part: int = PART,
) -> Tensor:
    """Return the column with the largest weight / E of each row: int64 [n].

    `weights` are float32 [n, m] >= 0; `seeds` and `positions` are int64 [n]. `guesses` int64 [n]
    are columns with a positive weight, ideally the likeliest. A row with NaN gives its guess. A
    program searches `part` blocks of `block` columns, a power of two.
    """
    rows, columns = weights.shape
    weights = weights.contiguous()
    values, found = _results(rows, triton.cdiv(columns, block * part), weights.device)
    if rows:
        _search[values.shape](
            weights, seeds, positions, guesses, values, found, columns, block=block, part=part
        )
    return _largest(values, found)


def search_kept(
    weights: Tensor,
    ranked: Tensor,
    tokens: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    block: int = BLOCK,
    part: int = PART,
) -> Tensor:
    """Like `search` among the columns that the filters of each row keep: int64 [n].

    `ranked` float32 [n, R] are the largest weights of each row in falling order, and `tokens` int64
    [n, R] their columns. The filters, int or float32 [n], keep a beginning of the ranks; a row
    without filters is searched in `weights`. A row with NaN gives its first token.
    """
    rows, columns = weights.shape
    weights, ranked, tokens = weights.contiguous(), ranked.contiguous(), tokens.contiguous()
    values, found = _results(rows, triton.cdiv(columns, block * part), weights.device)
    if rows:
        _search_kept[values.shape](
            weights,
            ranked,
            tokens,
            top_ks,
            top_ps,
            min_ps,
            seeds,
            positions,
            values,
            found,
            columns,
            ranked.shape[1],
            block=block,
            part=part,
        )
    return _largest(values, found)


def _results(rows: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the largest value of each part of a row, and for its column."""
    values = torch.empty(rows, parts, dtype=torch.float64, device=device)
    return values, torch.empty(rows, parts, dtype=torch.int64, device=device)


def _largest(values: Tensor, found: Tensor) -> Tensor:
    """The column of the largest value of each row."""
    return found.gather(1, values.argmax(1, keepdim=True)).squeeze(1)


@triton.jit(do_not_specialize=["columns"])
def _search(
    weights,
    seeds,
    positions,
    guesses,
    values,
    found,
    columns,
    block: tl.constexpr,
    part: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state = _hash_state(tl.load(seeds + row), tl.load(positions + row))
    best_column = tl.load(guesses + row)
    best = _value(tl.load(weights + row * columns + best_column), state, best_column)
    best, best_column = _search_part(
        weights + row * columns, state, best, best_column, columns, block, part
    )
    _store(values, found, row, best, best_column)


@triton.jit(do_not_specialize=["columns", "ranks"])
def _search_kept(
    weights,
    ranked,
    tokens,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    values,
    found,
    columns,
    ranks,
    block: tl.constexpr,
    part: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    state = _hash_state(tl.load(seeds + row), tl.load(positions + row))
    likeliest = tl.load(ranked + row * ranks)
    best_column = tl.load(tokens + row * ranks)
    best = _value(likeliest, state, best_column)
    if (top_k >= columns) & (top_p >= 1) & (min_p <= 0):
        best, best_column = _search_part(
            weights + row * columns, state, best, best_column, columns, block, part
        )
    elif tl.program_id(1) == 0:  # the ranks that are kept are few, so one program searches them
        floor = likeliest * min_p
        before = 0.0
        start = 0
        while start < ranks:
            rank = start + tl.arange(0, block)
            there = rank < ranks
            weight = tl.load(ranked + row * ranks + rank, mask=there, other=0.0)
            column = tl.load(tokens + row * ranks + rank, mask=there, other=0)
            mass = before + tl.cumsum(weight, axis=0) - weight
            kept = there & (rank < top_k) & (mass <= top_p) & (weight >= floor)
            weight = tl.where(kept, weight, 0.0)
            best, best_column = _better(weight, state, column, best, best_column)
            before += tl.sum(weight, axis=0)
            # Each filter keeps a beginning of the ranks, so a dropped one is followed by no other.
            start = tl.where(tl.min(kept.to(tl.int32), axis=0) > 0, start + block, ranks)
    _store(values, found, row, best, best_column)


@triton.jit
def _search_part(
    weights, state, best, best_column, columns, block: tl.constexpr, part: tl.constexpr
):
    """The largest value of this program's part of a row, and its column, if it beats `best`."""
    for step in range(part):
        column = (tl.program_id(1) * part + step) * block + tl.arange(0, block)
        weight = tl.load(weights + column, mask=column < columns, other=0.0)
        best, best_column = _better(weight, state, column, best, best_column)
    return best, best_column


@triton.jit
def _store(values, found, row, best, best_column):
    """Write the result of this program's part of a row."""
    result = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + result, best)
    tl.store(found + result, best_column)


@triton.jit
def _better(weight, state, column, best, best_column):
    """The largest value of a block, and its column, if it beats `best`; the lowest of equals."""
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
    return best, best_column


@triton.jit
def _value(weight, state, column):
    """The value of one column: weight / E."""
    return weight.to(tl.float64) / _exponential(_hash(state, column.to(tl.uint32)))


@triton.jit
def _hash_state(seed, position):
    """Mix a seed and a position, as `seeded.hash_state` does."""
    state = _mix(tl.zeros_like(seed).to(tl.uint32), seed.to(tl.uint32))
    state = _mix(state, (seed >> 32).to(tl.uint32))
    return _mix(state, position.to(tl.uint32))


@triton.jit
def _hash(state, column):
    """Mix uint32 columns into a state, as `seeded.murmur_hash32` does."""
    value = _mix(state, column) ^ 16
    value = (value ^ (value >> 16)) * 0x85EBCA6B
    value = (value ^ (value >> 13)) * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit
def _mix(state, word):
    word = word * 0xCC9E2D51
    word = (word << 15) | (word >> 17)
    state = state ^ (word * 0x1B873593)
    state = (state << 13) | (state >> 19)
    return state * 5 + 0xE6546B64


@triton.jit
def _exponential(hashed):
    """Return E in float64; E is exponential, and `seeded.gumbel` is -log(E)."""
    value = -tl.log(hashed.to(tl.float64) / 4294967295.0)
    return tl.minimum(tl.maximum(value, 2.3283064365386963e-10), _LARGEST)
