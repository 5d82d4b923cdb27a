"""Sampling seeds for more samples of one prompt than a client gave seeds."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, number: int) -> int:
    """The seed of sample `number`, which is at least 1; sample 0 has the client's `seed`."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # SGLang takes signed numbers of 64 bits
