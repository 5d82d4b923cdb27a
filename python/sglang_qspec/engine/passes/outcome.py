"""The accepted nodes and tokens of a verify pass, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Outcome(NamedTuple):
    """What `sample_and_accept` returned for bs requests with trees of up to D nodes."""

    predict: NDArray[np.int32]
    """int32 [bs * D]: the token after each accepted row."""
    accept_lens: NDArray[np.int32]
    """int32 [bs]: number of accepted nodes, the root included."""
    accept_index: NDArray[np.int32]
    """int32 [bs, D]: the rows of the accepted nodes, -1 behind them."""
    starts: NDArray[np.int64]
    """int64 [bs]: the row of each root."""

    @classmethod
    def read(
        cls,
        predict: Tensor,
        accept_lens: Tensor,
        accept_index: Tensor,
        starts: NDArray[np.int64],
    ) -> Outcome:
        """Copy the three int32 tensors to the host, with one synchronisation.

        `starts` are `DraftTrees.starts` of the pass.
        """
        flat = torch.cat((predict, accept_lens, accept_index.flatten())).cpu().numpy()
        nodes, requests = len(predict), len(accept_lens)
        rest = flat[nodes + requests :].reshape(tuple(accept_index.shape))
        return cls(flat[:nodes], flat[nodes : nodes + requests], rest, starts)

    @property
    def is_prefix(self) -> bool:
        """Whether each accepted path is the first nodes of its tree, so that its KV is in place.

        Indices count from the first node of each tree.
        """
        nodes = self.accept_index - self.starts[:, None]
        front = np.arange(self.accept_index.shape[1])
        return bool(((nodes == front) | (self.accept_index < 0)).all())

    @property
    def accepted_nodes(self) -> list[list[int]]:
        """The accepted draft nodes of each request in order, without the root."""
        return [
            row[1:length]
            for row, length in zip(
                (self.accept_index - self.starts[:, None]).tolist(),
                self.accept_lens.tolist(),
                strict=True,
            )
        ]

    @property
    def bonus_ids(self) -> list[int]:
        """The target's own token of each request after its accepted nodes."""
        last = self.accept_index[np.arange(len(self.accept_lens)), self.accept_lens - 1]
        bonus: list[int] = self.predict[last].tolist()
        return bonus
