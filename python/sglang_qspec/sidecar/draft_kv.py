"""Interface of a draft model with KV rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.sidecar.kv_rows import KVRows


class PassInput(NamedTuple):
    """A decode pass over n distinct rows, without its tokens: int64 [n] on the device or host."""

    rows: torch.Tensor
    positions: torch.Tensor
    """Position of each row's new token."""
    slots: torch.Tensor
    """KV slot of each row's new token, which the row has already."""
    lengths: torch.Tensor
    """Length of each row with its new token."""
    host_rows: NDArray[np.int64]
    host_lengths: NDArray[np.int64]


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

    def decode(self, given: PassInput, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the KV of one token of each row, int64 [n] on the device, in one decode pass.

        Returns the logits after these tokens, float [n, vocab_size].
        """
