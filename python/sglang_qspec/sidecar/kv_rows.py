"""Owns the KV slots of each row, with reference counts, because forked rows share slots.

All accounting is done on the host. The device has a copy of the table of slots, which the attention
kernels read; on a CPU the copy is the table itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.errors import DraftModelError


class NewSlots(NamedTuple):
    """Slots that were added to rows, row by row; int64 [n] on the host."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Positions of the new tokens in their rows."""
    slots: NDArray[np.int64]

    def taken(self, order: NDArray[np.int64]) -> NewSlots:
        """The slots in another order."""
        return NewSlots(*(values[order] for values in self))


class KVRows:
    """The rows of one KV pool: token sequences, identified by small integers.

    The length of a row is the number of tokens that its KV covers. Forked rows share the KV of
    their common prefix, which is freed with the last of these rows. Row 0 and slot 0 are reserved
    for padding. All errors are DraftModelError and leave the rows unchanged.
    """

    def __init__(self, table: torch.Tensor, context_len: int, slots: NDArray[np.int64]) -> None:
        """Distribute the distinct `slots`, int64 [n], each of which holds the KV of one token.

        `table`, int32 [1 + rows, width], holds the slot of each position of each row on the device.
        The maximum length of a row is the smaller of `context_len` and the width.
        """
        self.table = table
        self.context_len = min(context_len, table.shape[1])
        """Maximum length of a row, in tokens."""
        self.total_slots = len(slots)
        """Number of all KV slots, free or in use."""
        self._shares = table.device.type == "cpu"
        """Whether the table of the host is that of the device."""
        self._slots = table.numpy() if self._shares else np.zeros(table.shape, np.int32)
        """The table on the host."""
        self._free = np.array(slots[::-1], np.int64)
        """Free slots; the first `free_slots` of them are valid."""
        self._free_count = len(slots)
        self._holders = np.zeros(int(slots.max(initial=0)) + 1, np.int32)
        """Number of rows that hold each slot."""
        self._lengths = np.zeros(table.shape[0], np.int64)
        self._free_rows = list(range(table.shape[0] - 1, 0, -1))
        self._open: set[int] = set()

    @property
    def free_slots(self) -> int:
        """Number of free KV slots."""
        return self._free_count

    @property
    def free_rows(self) -> int:
        """Number of rows that can be opened."""
        return len(self._free_rows)

    @property
    def open_rows(self) -> int:
        """Number of open rows."""
        return len(self._open)

    def length(self, row: int) -> int:
        """Length of the row, in tokens."""
        return int(self._lengths[row])

    def slots(self, row: int) -> NDArray[np.int32]:
        """The slots of the row's tokens, int32 [length]."""
        return self._slots[row, : self._lengths[row]]

    def open(self) -> int:
        """Open an empty row and return it; fails if `free_rows` is 0."""
        if not self._free_rows:
            raise DraftModelError(f"all {self.table.shape[0] - 1} KV rows are in use")
        row = self._free_rows.pop()
        self._open.add(row)
        return row

    def fork(self, row: int, length: int) -> int:
        """Open a row that shares the first `length` tokens of `row`, and return it.

        Fails if `free_rows` is 0 or `row` is shorter than `length`.
        """
        if not 0 <= length <= self.length(row):
            raise DraftModelError(
                f"cannot share {length} tokens of row {row}, which holds {self.length(row)}"
            )
        child = self.open()
        shared = self._slots[row, :length]
        self._slots[child, :length] = shared
        if not self._shares:
            self.table[child, :length] = self.table[row, :length]
        self._holders[shared] += 1
        self._lengths[child] = length
        return child

    def append(self, rows: Sequence[int], counts: Sequence[int]) -> NewSlots:
        """Add `counts[i]` slots to row i, which is another one for each i.

        `place` must write them to the table of the device before a pass reads it.
        """
        lengths = self._lengths[rows]
        added = np.array(counts, np.int64)
        if (lengths + added).max(initial=0) > self.context_len:
            place = int((lengths + added).argmax())
            raise DraftModelError(
                f"cannot add {added[place]} tokens to row {rows[place]}: it holds "
                f"{lengths[place]} of at most {self.context_len}"
            )
        slots = self._take(int(added.sum()))
        at = np.repeat(np.array(rows, np.int64), added)
        starts = np.repeat(added.cumsum() - added - lengths, added)
        positions = np.arange(len(slots)) - starts
        self._slots[at, positions] = slots
        self._lengths[rows] = lengths + added
        return NewSlots(at, positions, slots)

    def place(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the arrays of `append`, which are on the device now, to the device's table."""
        if not self._shares:
            self.table[rows, positions] = slots.int()

    def truncate(self, row: int, length: int) -> None:
        """Remove the tokens of the row from position `length` on."""
        held = self.length(row)
        if not 0 <= length <= held:
            raise DraftModelError(f"cannot truncate row {row} from {held} to {length} tokens")
        if length < held:
            self._release(self._slots[row, length:held])
            self._lengths[row] = length

    def close(self, row: int) -> None:
        """Free the row, and the KV slots that it does not share with another row."""
        if row not in self._open:
            raise DraftModelError(f"row {row} is not open")
        self.truncate(row, 0)
        self._open.remove(row)
        self._free_rows.append(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless reference counts, slots, rows and the tables are correct."""
        holders = np.zeros_like(self._holders)
        for row in self._open:
            slots = self.slots(row)
            assert len(np.unique(slots)) == len(slots), f"row {row} holds a slot twice"
            assert self.table[row, : len(slots)].tolist() == slots.tolist(), "the tables differ"
            holders[slots] += 1
        assert np.array_equal(holders, self._holders), "a reference count is wrong"
        held = int((holders > 0).sum())
        assert held + self.free_slots == self.total_slots, (
            f"{held} held and {self.free_slots} free slots are not {self.total_slots}"
        )
        free = self._free[: self.free_slots]
        assert len(np.unique(free)) == len(free), "a slot is free twice"
        assert not self._holders[free].any(), "a free slot is held"
        assert len(self._open) + len(self._free_rows) == self.table.shape[0] - 1, "a row is lost"

    def _take(self, count: int) -> NDArray[np.int64]:
        if count > self.free_slots:
            raise DraftModelError(
                f"the pass needs {count} KV slots, but only {self.free_slots} are free"
            )
        self._free_count -= count
        slots = self._free[self._free_count : self._free_count + count].copy()
        self._holders[slots] = 1
        return slots

    def _release(self, slots: NDArray[np.int32]) -> None:
        """Decrement the reference counts of distinct slots, and free slots at zero."""
        left = self._holders[slots] - 1
        self._holders[slots] = left
        freed = slots[left == 0]
        self._free[self._free_count : self._free_count + len(freed)] = freed
        self._free_count += len(freed)
