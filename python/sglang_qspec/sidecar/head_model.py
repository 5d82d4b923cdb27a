"""An EAGLE head with KV rows, which drafts from the hidden states of a target (`heads.model`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.model import Eagle2Head
from sglang_qspec.heads.target_weights import EMBEDDING, LM_HEAD, find, target_weight
from sglang_qspec.sidecar.head_runner import HeadOptions, HeadOutput, HeadRunner, dtype_on
from sglang_qspec.transfers import mark, to_device

TOGETHER = 16
"""Rows with at most this number of new tokens attend in one call, padded to the longest."""
APART = 512
"""New tokens of another row that attend in one call."""


class HeadModel(HeadRunner):
    """An EAGLE head, its KV, and the target's embeddings."""

    def __init__(self, options: HeadOptions) -> None:
        """Load the head. Raises ConfigError if it, or the target's checkpoint, cannot be used."""
        device = torch.device(options.device)
        dtype = dtype_on(device)
        head = self._head = checkpoint.load(options.head, dtype, device)
        super().__init__(options, head.config, head.rotary.config.max_position_embeddings)
        self._embedding = self._of_target(EMBEDDING)
        self._ids = None
        if isinstance(head, Eagle2Head):
            has_own = find(options.target, LM_HEAD) is not None
            head.lm_head = self._of_target(LM_HEAD) if has_own else self._embedding
        else:
            self._ids = head.target_ids
        attention = head.midlayer.self_attn
        shape = (options.kv_slots + 1, attention.kv_heads, attention.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)

    def _of_target(self, name: str) -> Tensor:
        """The target's weight [vocab, width] with a name that ends in `name`.

        Raises ConfigError as `target_weight`.
        """
        shape = [self._head.config.vocab_size, self._head.config.hidden_size]
        return target_weight(self._options.target, name, shape).to(self._device, self._dtype)

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], states: NDArray[np.int16]
    ) -> HeadOutput:
        """As `HeadRunner`."""
        tokens = np.concatenate([np.array(part, np.int64) for part in token_ids])
        return self._run(rows, [len(part) for part in token_ids], tokens, self._states(states))

    @torch.inference_mode()
    def step(self, rows: Sequence[int], token_ids: Sequence[int], hidden: Tensor) -> HeadOutput:
        """As `HeadRunner`."""
        return self._run(rows, [1] * len(rows), np.array(token_ids, np.int64), hidden)

    def _run(
        self, rows: Sequence[int], counts: Sequence[int], tokens: NDArray[np.int64], hidden: Tensor
    ) -> HeadOutput:
        head = self._head
        added = self.rows.append(rows, counts)
        at, positions, slots, ids, last = to_device(
            self._device, *added, tokens, np.cumsum(counts) - 1
        )
        self.rows.place(at, positions, slots)
        embeds = functional.embedding(ids, self._embedding)[None]
        query, key, value, residual = head.inputs(embeds, hidden[None], positions[None])
        self._keys[slots] = key[0].transpose(0, 1)
        self._values[slots] = value[0].transpose(0, 1)
        mixed = self._attend(query[0].transpose(0, 1), rows, counts)
        output = head.output(mixed.transpose(0, 1)[None], residual)[0, last]
        logits = own = head.logits(output).float()
        if self._ids is not None:
            logits = own.new_full((len(rows), self.vocab_size), float("-inf"))
            logits[:, self._ids] = own
        mark(self._device)()  # the next token needs the logits at once, and passes are timed
        return HeadOutput(logits, output)

    def _attend(self, query: Tensor, rows: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The result of the attention for the new tokens of rows, [tokens, heads, head width].

        `query` has the same shape.
        """
        if max(counts) <= TOGETHER:
            return self._attend_together(query, rows, counts)
        found = []
        for row, part in zip(rows, query.split(list(counts)), strict=True):
            length = self.rows.length(row) - len(part)
            for piece in part.split(APART):
                length += len(piece)
                found.append(self._attend_together(piece, [row], [len(piece)], [length]))
        return torch.cat(found)

    def _attend_together(
        self,
        query: Tensor,
        rows: Sequence[int],
        counts: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """As `_attend`, in one call; `lengths` of the rows by default with all their tokens."""
        ends = [self.rows.length(row) for row in rows] if lengths is None else lengths
        most, longest = max(counts), max(ends)
        own, number, until = to_device(
            self._device,
            np.array(rows, np.int64),
            np.array(counts, np.int64),
            np.array(ends, np.int64),
        )
        slots = self.rows.table[own, :longest].long()
        new = torch.arange(most, device=self._device)
        sees = until[:, None] - number[:, None] + new  # the last position that each new token sees
        mask = torch.arange(longest, device=self._device) <= sees[:, :, None]
        there = new < number[:, None]
        padded = query.new_zeros(len(rows), most, *query.shape[1:])
        padded[there] = query
        mixed = functional.scaled_dot_product_attention(
            padded.transpose(1, 2),
            self._keys[slots].transpose(1, 2),
            self._values[slots].transpose(1, 2),
            attn_mask=mask[:, None],
            enable_gqa=True,
        )
        return mixed.transpose(1, 2)[there]
