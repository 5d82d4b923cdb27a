"""Which KV slots each row holds: reference-counted, so that forks share their prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang_qspec.errors import DraftModelError

Allocate = Callable[[int], torch.Tensor | None]
"""Gives n free slots, int64 [n], or None."""
Free = Callable[[torch.Tensor], None]
"""Takes slots back, int64 [n]."""


class KVRows:
    """The rows of one KV pool with pages of one token.

    `table` is the map that the attention kernels read: int32 [1 + rows, at least
    `context_len`], the slot of each position. Row 0 and slot 0 belong to padding and
    are never handed out.
    """

    def __init__(
        self,
        table: torch.Tensor,
        context_len: int,
        slots: int,
        allocate: Allocate,
        free: Free,
        free_slots: int,
    ) -> None:
        self.table = table
        self.context_len = min(context_len, table.shape[1])
        self.total = free_slots
        self.free_slots = free_slots
        self._allocate = allocate
        self._free = free
        self._holders = torch.zeros(slots, dtype=torch.int32, device=table.device)
        self._lengths = [0] * table.shape[0]
        self._free_rows = list(range(table.shape[0] - 1, 0, -1))
        self._open: set[int] = set()

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def open_rows(self) -> int:
        return len(self._open)

    def length(self, row: int) -> int:
        return self._lengths[row]

    def open(self) -> int:
        if not self._free_rows:
            raise DraftModelError(f"all {self.table.shape[0] - 1} rows of the draft KV are in use")
        row = self._free_rows.pop()
        self._open.add(row)
        return row

    def fork(self, row: int, length: int) -> int:
        if not 0 <= length <= self.length(row):
            raise DraftModelError(
                f"row {row} holds {self.length(row)} tokens, so {length} cannot be shared"
            )
        child = self.open()
        shared = self.table[row, :length]
        self.table[child, :length] = shared
        self._holders[shared.long()] += 1
        self._lengths[child] = length
        return child

    def append_one(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Give each of the rows, all different, one slot.

        Returns the slots, and the lengths before, which are the positions of the new tokens: both
        int64 [len(rows)], the second on the host.
        """
        lengths = [self._lengths[row] for row in rows]
        if max(lengths) >= self.context_len:
            raise DraftModelError(f"a row already holds {self.context_len} tokens, the context")
        slots = self._take(len(rows))
        positions = torch.tensor(lengths)
        device = self.table.device
        self.table[torch.tensor(rows).to(device), positions.to(device)] = slots.int()
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = length + 1
        return slots, positions

    def append(self, rows: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        """Give row i `counts[i]` slots; returns all of them, row by row, int64 [sum(counts)]."""
        for row, count in zip(rows, counts, strict=True):
            if self.length(row) + count > self.context_len:
                raise DraftModelError(
                    f"row {row} holds {self.length(row)} tokens and {count} more do not fit "
                    f"the context of {self.context_len}"
                )
        slots = self._take(sum(counts))
        for row, part in zip(rows, slots.split(list(counts)), strict=True):
            length = self.length(row)
            self.table[row, length : length + part.shape[0]] = part.int()
            self._lengths[row] = length + part.shape[0]
        return slots

    def truncate(self, row: int, length: int) -> None:
        held = self.length(row)
        if not 0 <= length <= held:
            raise DraftModelError(f"row {row} holds {held} tokens and cannot be cut to {length}")
        if length < held:
            self._release(self.table[row, length:held].long())
            self._lengths[row] = length

    def close(self, row: int) -> None:
        if row not in self._open:
            raise DraftModelError(f"row {row} is not open")
        self.truncate(row, 0)
        self._open.remove(row)
        self._free_rows.append(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or held by exactly its rows."""
        holders = torch.zeros_like(self._holders)
        for row in self._open:
            slots = self.table[row, : self.length(row)].long()
            assert slots.unique().numel() == slots.numel(), f"row {row} holds a slot twice"
            holders[slots] += 1
        assert torch.equal(holders, self._holders), "a slot's holders are miscounted"
        held = int((holders > 0).sum())
        assert held + self.free_slots == self.total, (
            f"{held} held and {self.free_slots} free slots are not {self.total}"
        )
        assert len(self._open) + len(self._free_rows) == self.table.shape[0] - 1, "a row is lost"

    def _take(self, count: int) -> torch.Tensor:
        slots = self._allocate(count)
        if slots is None:
            raise DraftModelError(
                f"the draft KV has {self.free_slots} free tokens, and {count} are needed"
            )
        self._holders[slots] = 1
        self.free_slots -= count
        return slots

    def _release(self, slots: torch.Tensor) -> None:
        """Drop one hold on each of the slots, all different."""
        left = self._holders[slots] - 1
        self._holders[slots] = left
        unheld = slots[left == 0]
        self._free(unheld)
        self.free_slots += unheld.shape[0]
