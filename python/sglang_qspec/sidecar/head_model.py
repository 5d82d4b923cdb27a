"""A head with KV rows, which drafts from the hidden states of a target (`heads`).

Row i of a text has the token at i + 1 and the target's state at i. So a row of the KV is one token
shorter than its text, and the first token of a text has none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from sglang_qspec.config import SLOTS_ON_CPU, SLOTS_ON_GPU
from sglang_qspec.errors import ConfigError
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.model import Eagle2Head
from sglang_qspec.link.fingerprint import fingerprint
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.transfers import mark, to_device

KV_SLOTS = 1 << 17
"""Default number of KV slots; a slot of an 8B target's head takes 4 KB."""
TOGETHER = 16
"""Rows with at most this number of new tokens attend in one call, padded to the longest."""
APART = 512
"""New tokens of another row that attend in one call."""
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
"""How the names of the target's embeddings and LM head end."""


@dataclass(frozen=True)
class HeadOptions:
    """Options for loading a head."""

    head: Path
    """Folder of the head's checkpoint."""
    target: Path
    """Folder of the target's checkpoint, for its embeddings, LM head and tokenizer."""
    device: str = "cpu"
    context_len: int | None = None
    """Maximum length of a text, in tokens; None selects the head's maximum."""
    kv_slots: int = KV_SLOTS
    batch: int | None = None
    """Maximum number of texts in a pass; None means SLOTS_ON_CPU or SLOTS_ON_GPU."""
    trust_remote_code: bool = False
    """Whether to run code that the target's tokenizer ships."""


class HeadOutput(NamedTuple):
    """What a pass gives after the last token of each of n rows."""

    logits: Tensor
    """Float [n, vocab], with the target's ids; -inf for ids that the head does not draft."""
    hidden: Tensor
    """[n, width]: what the head reads in place of the target's next state."""

    def of(self, places: Sequence[int]) -> HeadOutput:
        """The output of some of the rows."""
        if len(places) == len(self.logits):
            return self
        (chosen,) = to_device(self.logits.device, np.array(places, np.int64))
        return HeadOutput(self.logits[chosen], self.hidden[chosen])


class HeadModel:
    """A head, its KV, and the target's embeddings. Not thread-safe."""

    quantization: str | None = None

    def __init__(self, options: HeadOptions) -> None:
        """Load the head. Raises ConfigError if it, or the target's checkpoint, cannot be used."""
        self._options = options
        self._device = torch.device(options.device)
        on_cpu = self._device.type == "cpu"
        dtype = self._dtype = torch.float32 if on_cpu else torch.bfloat16
        self.dtype = str(dtype).removeprefix("torch.")
        head = self._head = checkpoint.load(options.head, dtype, self._device)
        self._embedding = self._of_target(EMBEDDING)
        self._ids = None
        if isinstance(head, Eagle2Head):
            has_own = _find(options.target, LM_HEAD) is not None
            head.lm_head = self._of_target(LM_HEAD) if has_own else self._embedding
        else:
            self._ids = head.target_ids
        self.name = os.path.basename(os.path.normpath(options.head))
        self.slots = options.batch or (SLOTS_ON_CPU if on_cpu else SLOTS_ON_GPU)
        """Maximum number of texts in a pass."""
        longest = head.rotary.config.max_position_embeddings
        context = min(options.context_len or longest, longest)
        table = torch.zeros(1 + 4 * self.slots, context, dtype=torch.int32, device=self._device)
        self.rows = KVRows(table, context, np.arange(1, options.kv_slots + 1))
        attention = head.midlayer.self_attn
        shape = (options.kv_slots + 1, attention.kv_heads, attention.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=self._device)
        self._values = torch.zeros_like(self._keys)

    def _of_target(self, name: str) -> Tensor:
        """The weight of the target whose name ends so, [vocab, width]. Raises ConfigError."""
        folder, config = self._options.target, self._head.config
        found = _find(folder, name)
        if found is None:
            raise ConfigError(f"{folder} has no weight that ends with {name}, which a head reads")
        wanted = [config.vocab_size, config.hidden_size]
        if list(found.shape) != wanted:
            raise ConfigError(
                f"{name} of {folder} has shape {list(found.shape)}, but the head needs {wanted}"
            )
        return found.to(self._device, self._dtype)

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the target."""
        return self._head.config.vocab_size

    @property
    def width(self) -> int:
        """Width of the states that the server sends: the projected ones."""
        return self._head.config.hidden_size

    def fingerprint(self) -> str:
        """Digest of the target's vocabulary."""
        tokenizer = AutoTokenizer.from_pretrained(
            self._options.target, trust_remote_code=self._options.trust_remote_code
        )
        return fingerprint(tokenizer.get_vocab())

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], states: NDArray[np.int16]
    ) -> HeadOutput:
        """Append one or more tokens to each of the distinct `rows`.

        `states` are the target's before these tokens, row by row: bfloat16 as int16 [tokens,
        width]. Raises DraftModelError as `KVRows.append`; the rows are then unchanged.
        """
        tokens = np.concatenate([np.array(part, np.int64) for part in token_ids])
        hidden = torch.from_numpy(states).view(torch.bfloat16).to(self._device, self._keys.dtype)
        return self._run(rows, [len(part) for part in token_ids], tokens, hidden)

    @torch.inference_mode()
    def step(self, rows: Sequence[int], token_ids: Sequence[int], hidden: Tensor) -> HeadOutput:
        """Append a token to each of the distinct `rows`, behind what the last pass gave for it.

        `hidden` is `HeadOutput.hidden` of these rows. Raises DraftModelError as `extend`.
        """
        return self._run(rows, [1] * len(rows), np.array(token_ids, np.int64), hidden)

    def unload(self) -> None:
        """Does nothing: the process holds nothing else."""

    def report_memory(self) -> None:
        """Does nothing: a head takes no memory beside its weights and its KV."""

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


def _find(target: Path, ending: str) -> Tensor | None:
    """The weight of a checkpoint whose name ends so; None if it has none."""
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the object has no __iter__
                if name.endswith(ending):
                    found: Tensor = file.get_tensor(name)
                    return found
    return None
