"""Repeatable draws: the hash from which SGLang derives a seeded request's random numbers.

A request with a `sampling_seed` gets, for every position and vocabulary column, a number that
depends on nothing else, so that its text does not depend on its neighbours in the batch.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bit, seed 0) of the 16 bytes (seed: 8, position: 4, column: 4).

    `seeds` and `positions` are [n], `columns` is [m], of any integer type; the result is
    int64 [n, m] in [0, 2**32). Source: Austin Appleby's public-domain MurmurHash3.
    """
    # int64 products wrap modulo 2**64, which leaves the low 32 bits right.
    bits = seeds.view(torch.int64) if seeds.dtype == torch.uint64 else seeds.long()
    state = torch.zeros_like(bits)
    for word in (bits & _WORD, (bits >> 32) & _WORD, positions.long() & _WORD):
        state = _mix(state, word)
    state = _mix(state.unsqueeze(1), (columns.long() & _WORD).unsqueeze(0))
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _WORD
    return state ^ (state >> 16)


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate((word * 0xCC9E2D51) & _WORD, 15)
    state = state ^ ((word * 0x1B873593) & _WORD)
    return (_rotate(state, 13) * 5 + 0xE6546B64) & _WORD


def _rotate(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
