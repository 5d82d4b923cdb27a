"""What heads of all kinds share in a sidecar: their options, their rows, and what a pass gives.

Row i of a text has the token at i + 1 and the target's state at i. So a row is one token shorter
than its text, and the first token of a text has none.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from sglang_qspec.config import SLOTS_ON_CPU, SLOTS_ON_GPU
from sglang_qspec.heads.config import HeadConfig
from sglang_qspec.link.fingerprint import fingerprint
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.transfers import to_device

LONGEST = 1 << 17
"""Maximum length of a text, in tokens, if the target does not limit it."""
KV_SLOTS = 1 << 17
"""Default number of KV slots; a slot of an 8B target's head takes 4 KB."""


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
    """[n, ...]: what the head reads in place of the target's next state."""

    def of(self, places: Sequence[int]) -> HeadOutput:
        """The output of some of the rows."""
        if len(places) == len(self.logits):
            return self
        (chosen,) = to_device(self.logits.device, np.array(places, np.int64))
        return HeadOutput(self.logits[chosen], self.hidden[chosen])


def dtype_on(device: torch.device) -> torch.dtype:
    """The number format in which heads compute on a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def longest_text(target: Path) -> int:
    """Maximum length of a text, in tokens, by the `config.json` of a target."""
    content = msgspec.json.decode((target / "config.json").read_bytes())
    return content.get("max_position_embeddings") or LONGEST


class HeadRunner(ABC):
    """A head with rows. Not thread-safe."""

    quantization: str | None = None
    longest_draft = 1 << 30
    """Maximum number of tokens that it drafts in a row."""

    def __init__(self, options: HeadOptions, config: HeadConfig, longest: int) -> None:
        """Make the rows of a head, for texts of at most `longest` tokens."""
        self._options, self._config = options, config
        self._device = torch.device(options.device)
        self._dtype = dtype_on(self._device)
        self.dtype = str(self._dtype).removeprefix("torch.")
        self.name = os.path.basename(os.path.normpath(options.head))
        on_cpu = self._device.type == "cpu"
        self.slots = options.batch or (SLOTS_ON_CPU if on_cpu else SLOTS_ON_GPU)
        """Maximum number of texts in a pass."""
        context = min(options.context_len or longest, longest)
        table = torch.zeros(1 + 4 * self.slots, context, dtype=torch.int32, device=self._device)
        self.rows = KVRows(table, context, np.arange(1, options.kv_slots + 1))

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the target."""
        return self._config.vocab_size

    @property
    def width(self) -> int:
        """Width of the states that the server sends, which are projected for EAGLE-3 heads."""
        return self._config.hidden_size

    def fingerprint(self) -> str:
        """Digest of the target's vocabulary."""
        tokenizer = AutoTokenizer.from_pretrained(
            self._options.target, trust_remote_code=self._options.trust_remote_code
        )
        return fingerprint(tokenizer.get_vocab())

    @abstractmethod
    def extend(
        self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], states: NDArray[np.int16]
    ) -> HeadOutput:
        """Append one or more tokens to each of the distinct `rows`.

        `states` are the target's before these tokens, row by row: bfloat16 as int16 [tokens,
        width]. Raises DraftModelError as `KVRows.append`; the rows are then unchanged.
        """

    @abstractmethod
    def step(self, rows: Sequence[int], token_ids: Sequence[int], hidden: Tensor) -> HeadOutput:
        """Append a token to each of the distinct `rows`, behind what the last pass gave for it.

        `hidden` is `HeadOutput.hidden` of these rows. Raises DraftModelError as `extend`.
        """

    def unload(self) -> None:  # noqa: B027 - draft models need it, heads do not
        """Does nothing: the process holds nothing else."""

    def report_memory(self) -> None:  # noqa: B027 - draft models need it, heads do not
        """Does nothing: a head takes no memory beside its weights and its KV."""

    def _states(self, states: NDArray[np.int16]) -> Tensor:
        """States of the link as the head computes with them."""
        return torch.from_numpy(states).view(torch.bfloat16).to(self._device, self._dtype)
