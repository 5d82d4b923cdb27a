"""Hydra heads, which draft from the newest state and token of a model (`heads.hydra`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from sglang_qspec.cpu.linear import Int8Linear
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.hydra import HydraHead
from sglang_qspec.heads.target_weights import EMBEDDING, target_weight
from sglang_qspec.sidecar.head_runner import (
    HeadOptions,
    HeadOutput,
    HeadRunner,
    dtype_on,
    longest_text,
)
from sglang_qspec.transfers import mark, to_device


class ReadyHydra:
    """A Hydra head with the embeddings of its model, ready to draft on a device.

    On a CPU its weights have 8 bits: reading them takes most of its time.
    """

    def __init__(self, folder: Path, model: Path, device: torch.device) -> None:
        """Load the head in `folder`, and the embeddings in the checkpoint `model`.

        Raises ConfigError if they cannot be used.
        """
        self._dtype = dtype_on(device)
        self._head = head = checkpoint.load_hydra(folder, self._dtype, device)
        self.config = head.config
        shape = [head.config.vocab_size, head.config.hidden_size]
        self._embedding = target_weight(model, EMBEDDING, shape).to(device)
        self.target_ids = head.target_ids
        """The model's id of each of the head's ids, int64 [draft ids]."""
        if device.type == "cpu":
            _pack(head)

    def read(self, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the head's ids behind tokens, float [n, draft ids], and its output [n, width].

        `token_ids` int64 [n] were drawn behind the `states` [n, width].
        """
        # The table keeps the checkpoint's dtype: in float32 it would be far larger than the head.
        embeds = functional.embedding(token_ids, self._embedding).to(self._dtype)
        output = self._head.output(embeds, states.to(self._dtype))
        return self._head.logits(output).float(), output


class HydraModel(HeadRunner):
    """A Hydra head of a target. Its rows have no KV; they count the tokens of the texts."""

    def __init__(self, options: HeadOptions) -> None:
        """Load the head. Raises ConfigError if it, or the target's checkpoint, cannot be used."""
        device = torch.device(options.device)
        self._head = ReadyHydra(options.head, options.target, device)
        super().__init__(options, self._head.config, longest_text(options.target))

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], states: NDArray[np.int16]
    ) -> HeadOutput:
        """As `HeadRunner`."""
        counts = [len(part) for part in token_ids]
        self.rows.append(rows, counts)
        ids, last = to_device(
            self._device,
            np.array([part[-1] for part in token_ids], np.int64),
            np.cumsum(counts) - 1,
        )
        return self._read(ids, self._states(states)[last])

    @torch.inference_mode()
    def step(self, rows: Sequence[int], token_ids: Sequence[int], hidden: Tensor) -> HeadOutput:
        """As `HeadRunner`."""
        self.rows.append(rows, [1] * len(token_ids))
        (ids,) = to_device(self._device, np.array(token_ids, np.int64))
        return self._read(ids, hidden)

    def _read(self, token_ids: Tensor, states: Tensor) -> HeadOutput:
        own, output = self._head.read(token_ids, states)
        logits = own.new_full((len(own), self.vocab_size), float("-inf"))
        logits[:, self._head.target_ids] = own
        mark(self._device)()  # the drafts need the logits at once, and passes are timed
        return HeadOutput(logits, output)


class _Int8Layer(nn.Linear):
    """A linear layer with packed 8-bit weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self._product = Int8Linear.quantize(layer.weight.detach())

    def forward(self, rows: Tensor) -> Tensor:
        """The product of rows [n, in] with the weights: [n, out]."""
        return self._product(rows)


def _pack(head: HydraHead) -> None:
    """Round the layers of a head to 8 bits, and pack them."""
    head.up, head.down = _Int8Layer(head.up), _Int8Layer(head.down)
    head.lm_head = _Int8Layer(head.lm_head)
