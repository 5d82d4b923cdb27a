"""An index from hashes to numbers that takes eight bytes for each pair."""

from __future__ import annotations

from array import array
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

NUMBER_BITS = 24
HASH_BITS = 64 - NUMBER_BITS
MAX_NUMBERS = 1 << NUMBER_BITS
"""The numbers of an index are below this one."""
_NUMBER = np.uint64(MAX_NUMBERS - 1)
_SHIFT = np.uint64(NUMBER_BITS)


class Postings:
    """Pairs of a hash of 40 bits and a number of 24 bits, sorted after the last one is added."""

    def __init__(self) -> None:
        self._pairs = array("Q")
        self._sorted: NDArray[np.uint64] | None = None

    def add(self, hashes: NDArray[np.uint64], number: int) -> None:
        """Add a number under each of some hashes, uint64 [n]."""
        self._sorted = None
        self._pairs.frombytes((hashes << _SHIFT | np.uint64(number)).tobytes())

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The numbers under any of the hashes, uint64: in rising order for each hash."""
        if self._sorted is None:
            self._sorted = np.frombuffer(self._pairs, np.uint64)
            self._sorted.sort()  # in the memory of the array
        first = np.searchsorted(self._sorted, hashes << _SHIFT)
        last = np.searchsorted(self._sorted, hashes << _SHIFT | _NUMBER, side="right")
        parts = [self._sorted[low:high] for low, high in zip(first, last, strict=True)]
        return np.concatenate(parts) & _NUMBER if parts else np.empty(0, np.uint64)


def hash_of(text: str) -> NDArray[np.uint64]:
    """The hash of a text: uint64 [1]."""
    found = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BITS // 8).digest()
    return np.array([int.from_bytes(found, "little")], np.uint64)
