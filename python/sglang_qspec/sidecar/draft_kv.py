"""Interface of a draft model with KV rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.sidecar.kv_rows import KVRows


class PassInput(NamedTuple):
    """A decode pass over n tokens, without these: int64 [n] on the device or host."""

    rows: torch.Tensor
    positions: torch.Tensor
    """Position of each token in its row."""
    slots: torch.Tensor
    """KV slot of each token, which its row has already."""
    lengths: torch.Tensor
    """Length of each token's row up to and with the token."""
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

    @property
    def states(self) -> torch.Tensor:
        """What the LM head read for the rows of the latest pass, [n, width].

        Only a model that is loaded to keep its states has them.
        """

    def extend(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append one or more tokens to each of the distinct `rows`, in one prefill pass.

        Returns the logits after each row's last token, float [len(rows), vocab_size]. Raises
        DraftModelError if the free KV slots are too few or a row would exceed its maximum length;
        the rows are then unchanged.
        """

    def decode(self, given: PassInput, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the KV of n tokens, int64 [n] on the device, in one decode pass.

        A row may have several tokens, at successive positions. Returns the logits after each
        token, float [n, vocab_size].
        """
