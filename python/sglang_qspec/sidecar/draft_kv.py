"""What the drafters need of a draft model: rows of KV that grow, fork, shrink and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class DraftKV(Protocol):
    """A causal language model that keeps the KV of many token sequences, one to a row.

    A row is a small number. Its length is how many tokens its KV covers. Rows made by `fork`
    share the KV of their common prefix, which is freed with the last row that holds it.
    """

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary: the width of the logits."""

    @property
    def context_len(self) -> int:
        """Longest sequence that a row may hold."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens after which the model has nothing more to say."""

    @property
    def free_rows(self) -> int:
        """How many rows can be opened."""

    @property
    def open_rows(self) -> int:
        """How many rows are open."""

    @property
    def free_tokens(self) -> int:
        """How many tokens of KV can be added to the rows."""

    @property
    def total_tokens(self) -> int:
        """How many tokens of KV there are when no row is open."""

    def length(self, row: int) -> int:
        """Tokens that the row's KV covers."""

    def open(self) -> int:
        """A new, empty row. Raises DraftModelError when `free_rows` is 0."""

    def fork(self, row: int, length: int) -> int:
        """A new row that shares the first `length` tokens of `row`.

        Raises DraftModelError when `free_rows` is 0 or the row is shorter.
        """

    def extend(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append one or more tokens to each of the rows, which must all be different.

        Returns the logits after each row's last token, float [len(rows), vocab_size].
        Raises DraftModelError when there are not enough `free_tokens` or a row would outgrow
        `context_len`; no row has changed then.
        """

    def step(self, rows: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """`extend` by one token each, as one decode pass: float [len(rows), vocab_size]."""

    def truncate(self, row: int, length: int) -> None:
        """Forget all tokens of the row from position `length` on."""

    def close(self, row: int) -> None:
        """Give the row back, and the KV that no other row shares."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless every token of KV is free or held by an open row."""
