"""Repeatable draws: the hash from which SGLang derives a seeded request's random numbers.

The number for a position and a token depends on the request's sampling seed alone. So the text
depends neither on the other requests of the batch nor on the drafts. A drafter that knows the seed
can draw with the same numbers.
"""

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bit, seed 0) of the 16 bytes (seed: 8, position: 4, column: 4).

    `seeds` and `positions` are [n]; `columns` are [m], or [n, m] if they differ by row. All may
    have any integer type. The result is int64 [n, m] in [0, 2**32). Source: Austin Appleby's
    public-domain MurmurHash3.
    """
    state = hash_state(seeds, positions).unsqueeze(1)
    state = _mix(state, columns.long() & _WORD) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _WORD
    return state ^ (state >> 16)


def hash_state(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the state of the hash before the column is mixed in: int64 [n]."""
    # int64 products wrap modulo 2**64, so their low 32 bits are exact.
    bits = seeds.view(torch.int64) if seeds.dtype == torch.uint64 else seeds.long()
    state = torch.zeros_like(bits)
    for word in (bits & _WORD, (bits >> 32) & _WORD, positions.long() & _WORD):
        state = _mix(state, word)
    return state


def gumbel(hashes: Tensor) -> Tensor:
    """Gumbel noise from hashes in [0, 2**32), float64, by the formula of `multinomial_with_seed`.

    The arg max of noise + log-probability is a draw from the distribution.
    """
    logs = (hashes.double() / _WORD).log_()
    logs = logs.clamp_(min=torch.finfo(torch.float64).min, max=-math.ldexp(1, -32))
    return logs.neg_().log_().neg_()


def _mix(state: Tensor, word: Tensor) -> Tensor:
    word = _rotate((word * 0xCC9E2D51) & _WORD, 15)
    state = state ^ ((word * 0x1B873593) & _WORD)
    return (_rotate(state, 13) * 5 + 0xE6546B64) & _WORD


def _rotate(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
