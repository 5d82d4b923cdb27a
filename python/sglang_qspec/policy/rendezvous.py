"""Weighted rendezvous hashing: every key has its own order of the names.

A key chooses the name with the highest score. The score depends only on key, name and weight, so
servers that know the same names make the same choice. If a name leaves, only the keys that chose it
choose another name. If a name joins, keys move only to this name.

A name with the weight w and the uniform hash u has the score -w / ln(u), as in "Weighted
Distributed Hash Tables" (Schindelhauer and Schomaker, 2005). Its share of the keys is proportional
to w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b


def choose(key: bytes, weights: Mapping[str, float]) -> str:
    """The name that `key` chooses among at least one.

    `key` has at most 64 bytes, and all weights are over 0.
    """
    return max(weights, key=lambda name: (_score(key, name, weights[name]), name))


def _score(key: bytes, name: str, weight: float) -> float:
    digest = blake2b(name.encode(), digest_size=8, key=key).digest()
    # A float holds 52 bits and a half exactly, so the quotient is neither 0 nor 1.
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / (1 << 52)
    return -weight / math.log(uniform)
