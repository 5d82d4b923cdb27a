"""Interface of a draft model with KV rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_qspec.sidecar.kv_rows import KVRows


class DraftKV(Protocol):
    """A causal language model with the KV of many token sequences, one in each of its `rows`."""

    @property
    def rows(self) -> KVRows:
        """The rows of the model's KV."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, which is the width of the logits."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the model."""

    def extend(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append one or more tokens to each of the distinct `rows`, in one prefill pass.

        Returns the logits after each row's last token, float [len(rows), vocab_size]. Raises
        DraftModelError if the free KV slots are too few or a row would exceed its maximum length;
        the rows are then unchanged.
        """

    def step(self, rows: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Append one token to each of the distinct `rows`, in one decode pass; as `extend`."""
