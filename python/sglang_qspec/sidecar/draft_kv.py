"""Interface of a draft model with KV rows that can be extended, forked, truncated and closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class DraftKV(Protocol):
    """A causal language model with the KV of many token sequences, one in each row.

    A row is identified by a small integer. Its length is the number of tokens that its KV covers.
    Forked rows share the KV of their common prefix, which is freed with the last of these rows.
    """

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, which is the width of the logits."""

    @property
    def context_len(self) -> int:
        """Maximum length of a row, in tokens."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the model."""

    @property
    def free_rows(self) -> int:
        """Number of rows that can be opened."""

    @property
    def open_rows(self) -> int:
        """Number of open rows."""

    @property
    def free_tokens(self) -> int:
        """Number of free KV slots; a slot holds the KV of one token."""

    @property
    def total_tokens(self) -> int:
        """Number of all KV slots, free or in use."""

    def length(self, row: int) -> int:
        """Length of the row, in tokens."""

    def open(self) -> int:
        """Open an empty row and return it. Raises DraftModelError if `free_rows` is 0."""

    def fork(self, row: int, length: int) -> int:
        """Open a row that shares the first `length` tokens of `row`, and return it.

        Raises DraftModelError if `free_rows` is 0 or `row` is shorter than `length`.
        """

    def extend(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append one or more tokens to each of the distinct `rows`, in one prefill pass.

        Returns the logits after each row's last token, float [len(rows), vocab_size]. Raises
        DraftModelError if `free_tokens` are too few or a row would exceed `context_len`; the rows
        are then unchanged.
        """

    def step(self, rows: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Append one token to each of the distinct `rows`, in one decode pass; as `extend`."""

    def truncate(self, row: int, length: int) -> None:
        """Remove the tokens of the row from position `length` on."""

    def close(self, row: int) -> None:
        """Free the row, and the KV slots that it does not share with another row."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless every KV slot is free or held by an open row."""
