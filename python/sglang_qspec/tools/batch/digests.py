"""A set of texts that keeps eight bytes of each."""

from __future__ import annotations

import hashlib
from array import array

_FIRST_SLOTS = 1024


class Digests:
    """The texts that were added, as 64-bit digests in an open hash table.

    A million texts take 16 MiB. The chance that any two of a million texts have the same digest is
    3e-8; the second one would then count as already added.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _FIRST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str) -> bool:
        return self._slots[self._slot(_digest(text))] != 0

    @property
    def nbytes(self) -> int:
        """Size of the table, in bytes."""
        return self._slots.itemsize * len(self._slots)

    def add(self, text: str) -> bool:
        """Add a text; returns whether it is new."""
        digest = _digest(text)
        slot = self._slot(digest)
        if self._slots[slot]:
            return False
        self._slots[slot] = digest
        self._count += 1
        if 2 * self._count > len(self._slots):
            self._grow()
        return True

    def _slot(self, digest: int) -> int:
        """The slot that holds the digest, or the free slot where it belongs."""
        slots = self._slots
        last = len(slots) - 1
        slot = digest & last
        while slots[slot] not in (0, digest):
            slot = (slot + 1) & last
        return slot

    def _grow(self) -> None:
        before = self._slots
        self._slots = array("Q", bytes(2 * 8 * len(before)))
        for digest in before:
            if digest:
                self._slots[self._slot(digest)] = digest


def _digest(text: str) -> int:
    """64 bits that are never 0, which stands for a free slot."""
    found = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(found, "little") or 1
