"""The accepted nodes and tokens of a pass, on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_qspec.transfers import HostCopy


class Outcome(NamedTuple):
    """The result of `sample_and_accept` for bs requests with trees of up to D nodes."""

    predict: NDArray[np.int32]
    """int32 [bs * D]: the target's token after each row."""
    accept_lens: NDArray[np.int32]
    """int32 [bs]: number of accepted nodes, the root included."""
    accept_index: NDArray[np.int32]
    """int32 [bs, D]: the rows of the accepted nodes, then -1."""
    starts: NDArray[np.int64]
    """int64 [bs]: the row of each root."""

    @property
    def is_prefix(self) -> bool:
        """Whether each accepted path has the first nodes of its tree, so its KV is in place."""
        nodes = self.accept_index - self.starts[:, None]
        front = np.arange(self.accept_index.shape[1])
        return bool(((nodes == front) | (self.accept_index < 0)).all())

    @property
    def accepted_nodes(self) -> list[list[int]]:
        """The accepted draft nodes of each request, as indices in its tree; without the root."""
        return [
            row[1:length]
            for row, length in zip(
                (self.accept_index - self.starts[:, None]).tolist(),
                self.accept_lens.tolist(),
                strict=True,
            )
        ]

    @property
    def tokens(self) -> list[list[int]]:
        """The new output tokens of each request: its accepted draft tokens and the target's own."""
        return [
            self.predict[row[:length]].tolist()
            for row, length in zip(self.accept_index, self.accept_lens.tolist(), strict=True)
        ]

    @property
    def bonus_ids(self) -> list[int]:
        """The target's own token after the accepted nodes of each request."""
        last = self.accept_index[np.arange(len(self.accept_lens)), self.accept_lens - 1]
        bonus: list[int] = self.predict[last].tolist()
        return bonus


class PlainOutcome(NamedTuple):
    """The tokens of a pass without drafts, with the properties of an `Outcome`."""

    bonus_ids: list[int]
    """The target's token of each request."""

    @property
    def accepted_nodes(self) -> list[list[int]]:
        """No draft node for any request; do not change the list."""
        return [[]] * len(self.bonus_ids)

    @property
    def tokens(self) -> list[list[int]]:
        """The new output token of each request."""
        return [[token_id] for token_id in self.bonus_ids]


class ComingOutcome:
    """The outcome of a pass that may still run; the copy to the host has been started."""

    def __init__(
        self,
        predict: Tensor,
        accept_lens: Tensor,
        accept_index: Tensor,
        starts: NDArray[np.int64],
    ) -> None:
        """Start the copy of three int32 tensors; `starts` are `DraftTrees.starts` of the pass."""
        self.predict, self.accept_lens, self.accept_index = predict, accept_lens, accept_index
        self._nodes, self._shape = len(predict), tuple(accept_index.shape)
        self._copy = HostCopy(torch.cat((predict, accept_lens, accept_index.flatten())))
        self._starts = starts
        self._outcome: Outcome | None = None

    def read(self) -> Outcome:
        """Wait for the pass and return its outcome; later calls return the same object."""
        if self._outcome is None:
            flat = self._copy.read()
            rest = self._nodes + self._shape[0]
            self._outcome = Outcome(
                flat[: self._nodes],
                flat[self._nodes : rest],
                flat[rest:].reshape(self._shape),
                self._starts,
            )
        return self._outcome


class ComingTokens:
    """The tokens of a pass without drafts that may still run; read like a `ComingOutcome`."""

    def __init__(self, result: Any, *, copied: bool) -> None:
        """The tokens [bs] of SGLang's `result`; start their copy unless SGLang has them `copied`.

        With the overlap scheduler SGLang does, once the worker has returned the result.
        """
        self._result = result
        self._copy = None if copied else HostCopy(result.next_token_ids)

    def wait(self) -> None:
        """Wait for the pass."""
        if self._copy is None:
            self._result.copy_done.synchronize()
        else:
            self._copy.read()

    def read(self) -> PlainOutcome:
        """Wait for the pass and return its outcome."""
        self.wait()
        tokens = self._result.next_token_ids if self._copy is None else self._copy.read()
        return PlainOutcome(tokens.tolist())
