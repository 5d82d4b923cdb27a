"""What a completion's tokens are sampled with: parameters, seeds and random numbers."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one completion."""

    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens that are sampled from (nucleus sampling,
    Holtzman et al., 2020); 1 means all tokens. The probabilities are relative to the blocks that
    are sampled from, which hold nearly the whole probability."""


GREEDY = Sampling(0.0)


def seed_of(token_ids: Sequence[int], completion: int) -> int:
    """Derive the seed of a completion from the prompt and the completion's number: 64 bits."""
    digest = hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=8)
    digest.update(completion.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def uniforms(seeds: Sequence[int], positions: ArrayLike) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each pair of seed and position: [n], or [m, n].

    There are n seeds, and `positions` are [n] or [m, n]. The generator is SplitMix64 (Steele, Lea
    and Flood, 2014) with the position as its counter, so a number does not depend on the other rows
    of the batch.
    """
    with np.errstate(over="ignore"):
        counters = (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = np.array(seeds, dtype=np.uint64) + counters
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
