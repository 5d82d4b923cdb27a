"""Owns the KV slots of each row, with reference counts, because forked rows share slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_qspec.errors import DraftModelError


class KVPool(Protocol):
    """The free KV slots of a device, with pages of one token; SGLang's allocators are such."""

    size: int
    """Number of slots; they are numbered from 1 on."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate slots and return them, int64 [need_size]; None if fewer are free."""

    def free(self, free_index: torch.Tensor) -> None:
        """Free these slots, int64 [n]."""

    def available_size(self) -> int:
        """Number of free slots."""


class KVRows:
    """The rows of one KV pool: token sequences, identified by small integers.

    The length of a row is the number of tokens that its KV covers. Forked rows share the KV of
    their common prefix, which is freed with the last of these rows. Row 0 and slot 0 are reserved
    for padding. All errors are DraftModelError and leave the rows unchanged.
    """

    def __init__(self, table: torch.Tensor, context_len: int, pool: KVPool) -> None:
        """Take over all free slots of `pool`.

        `table`, int32 [1 + rows, width], holds the slot of each position of each row; the attention
        kernels read it. The maximum length of a row is the smaller of `context_len` and the width.
        """
        self.table = table
        self.context_len = min(context_len, table.shape[1])
        """Maximum length of a row, in tokens."""
        self.total_slots = pool.available_size()
        """Number of all KV slots, free or in use; a slot holds the KV of one token."""
        self._pool = pool
        self._holders = torch.zeros(pool.size + 1, dtype=torch.int32, device=table.device)
        self._lengths = [0] * table.shape[0]
        self._free_rows = list(range(table.shape[0] - 1, 0, -1))
        self._open: set[int] = set()

    @property
    def free_slots(self) -> int:
        """Number of free KV slots."""
        return self._pool.available_size()

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
        return self._lengths[row]

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
        shared = self.table[row, :length]
        self.table[child, :length] = shared
        self._holders[shared.long()] += 1
        self._lengths[child] = length
        return child

    def append_one(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one slot to each of the distinct rows.

        Returns the slots, and the positions of the new tokens on the host, both int64 [len(rows)].
        """
        lengths = [self._lengths[row] for row in rows]
        if max(lengths) >= self.context_len:
            raise DraftModelError(f"a row is full: it holds {self.context_len} tokens")
        slots = self._take(len(rows))
        positions = torch.tensor(lengths)
        device = self.table.device
        self.table[torch.tensor(rows).to(device), positions.to(device)] = slots.int()
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = length + 1
        return slots, positions

    def append(self, rows: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Add `counts[i]` slots to row i; return them row by row, int64 [sum(counts)]."""
        for row, count in zip(rows, counts, strict=True):
            if self.length(row) + count > self.context_len:
                raise DraftModelError(
                    f"cannot add {count} tokens to row {row}: it holds {self.length(row)} of at "
                    f"most {self.context_len}"
                )
        slots = self._take(sum(counts))
        for row, part in zip(rows, slots.split(list(counts)), strict=True):
            length = self.length(row)
            self.table[row, length : length + part.shape[0]] = part.int()
            self._lengths[row] = length + part.shape[0]
        return slots

    def truncate(self, row: int, length: int) -> None:
        """Remove the tokens of the row from position `length` on."""
        held = self.length(row)
        if not 0 <= length <= held:
            raise DraftModelError(f"cannot truncate row {row} from {held} to {length} tokens")
        if length < held:
            self._release(self.table[row, length:held].long())
            self._lengths[row] = length

    def close(self, row: int) -> None:
        """Free the row, and the KV slots that it does not share with another row."""
        if row not in self._open:
            raise DraftModelError(f"row {row} is not open")
        self.truncate(row, 0)
        self._open.remove(row)
        self._free_rows.append(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless reference counts, free slots and free rows are correct."""
        holders = torch.zeros_like(self._holders)
        for row in self._open:
            slots = self.table[row, : self.length(row)].long()
            assert slots.unique().numel() == slots.numel(), f"row {row} holds a slot twice"
            holders[slots] += 1
        assert torch.equal(holders, self._holders), "a reference count is wrong"
        held = int((holders > 0).sum())
        assert held + self.free_slots == self.total_slots, (
            f"{held} held and {self.free_slots} free slots are not {self.total_slots}"
        )
        assert len(self._open) + len(self._free_rows) == self.table.shape[0] - 1, "a row is lost"

    def _take(self, count: int) -> torch.Tensor:
        slots = self._pool.alloc(count)
        if slots is None:
            raise DraftModelError(
                f"the pass needs {count} KV slots, but only {self.free_slots} are free"
            )
        self._holders[slots] = 1
        return slots

    def _release(self, slots: torch.Tensor) -> None:
        """Decrement the reference counts of distinct slots, and free slots at zero."""
        left = self._holders[slots] - 1
        self._holders[slots] = left
        self._pool.free(slots[left == 0])
