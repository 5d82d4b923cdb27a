"""A draft model that answers at once, to measure the link and the loop alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

VOCAB = 1000
TOKENS = 1 << 24
ROWS = 4096


class InstantRows:
    """Rows without KV: they count their tokens, and a forked row counts its whole length."""

    context_len = 1 << 16
    total_slots = TOKENS

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._free = list(range(ROWS))
        self._used = 0

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def open_rows(self) -> int:
        return len(self._lengths)

    @property
    def free_slots(self) -> int:
        return TOKENS - self._used

    def length(self, row: int) -> int:
        return self._lengths[row]

    def open(self) -> int:
        row = self._free.pop()
        self._lengths[row] = 0
        return row

    def fork(self, row: int, length: int) -> int:
        assert length <= self._lengths[row]
        new = self.open()
        self.grow(new, length)
        return new

    def truncate(self, row: int, length: int) -> None:
        self.grow(row, length - self._lengths[row])

    def close(self, row: int) -> None:
        self._used -= self._lengths.pop(row)
        self._free.append(row)

    def check_integrity(self) -> None:
        assert self._used == sum(self._lengths.values())
        assert len(self._free) + len(self._lengths) == ROWS

    def grow(self, row: int, count: int) -> None:
        self._lengths[row] += count
        self._used += count


class InstantModel:
    """A `DraftKV` without a model; its logits are constant."""

    name = "instant"
    dtype = "float32"
    device = "cpu"
    vocab_size = VOCAB
    eos_token_ids: frozenset[int] = frozenset()
    prefill_tokens = 2048

    def __init__(self) -> None:
        self.rows = InstantRows()
        self._logits = torch.zeros(ROWS, VOCAB)

    def extend(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        for row, part in zip(rows, token_ids, strict=True):
            self.rows.grow(row, len(part))
        return self._logits[: len(rows)].clone()

    def step(self, rows: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        for row, _ in zip(rows, token_ids, strict=True):
            self.rows.grow(row, 1)
        return self._logits[: len(rows)].clone()
