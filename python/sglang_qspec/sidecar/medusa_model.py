"""Medusa heads, which draft from the newest state of a target alone (`heads.medusa`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_qspec.heads import checkpoint
from sglang_qspec.sidecar.head_runner import (
    HeadOptions,
    HeadOutput,
    HeadRunner,
    dtype_on,
    longest_text,
)
from sglang_qspec.transfers import mark, to_device


class MedusaModel(HeadRunner):
    """All heads of a target. Its rows have no KV; they count the tokens of the texts."""

    def __init__(self, options: HeadOptions) -> None:
        """Load the heads. Raises ConfigError if they cannot be used."""
        device = torch.device(options.device)
        self._heads = checkpoint.load_medusa(options.head, dtype_on(device), device)
        super().__init__(options, self._heads.config, longest_text(options.target))
        self.longest_draft = self._heads.config.heads

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], states: NDArray[np.int16]
    ) -> HeadOutput:
        """As `HeadRunner`. All heads draft at once; `hidden` has the logits of the later ones."""
        counts = [len(part) for part in token_ids]
        self.rows.append(rows, counts)
        (last,) = to_device(self._device, np.cumsum(counts) - 1)
        newest = self._states(states)[last]
        drafted = [
            self._heads.logits(self._heads.output(newest, number), number)
            for number in range(self.longest_draft)
        ]
        logits = torch.stack(drafted, 1).float()
        mark(self._device)()  # the drafts need the logits at once, and passes are timed
        return HeadOutput(logits[:, 0], logits[:, 1:])

    @torch.inference_mode()
    def step(self, rows: Sequence[int], token_ids: Sequence[int], hidden: Tensor) -> HeadOutput:
        """As `HeadRunner`; there is nothing left to compute."""
        self.rows.append(rows, [1] * len(token_ids))
        return HeadOutput(hidden[:, 0], hidden[:, 1:])
