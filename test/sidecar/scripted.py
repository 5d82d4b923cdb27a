"""A draft model that follows a script: it accounts for KV but has no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_qspec.errors import DraftModelError
from sglang_qspec.sidecar.draft_kv import PassInput
from sglang_qspec.sidecar.kv_rows import KVRows

Script = Callable[[tuple[int, ...]], int]
"""The token that follows a sequence."""


def count_on(sequence: tuple[int, ...]) -> int:
    """The script that counts up: 5, 6, 7, ..."""
    return sequence[-1] + 1


class ScriptedModel:
    """A `DraftKV` that predicts `script`'s tokens, with KV for `tokens` tokens in `rows` rows.

    `passes` records every pass as (verb, rows, tokens).
    """

    def __init__(
        self,
        script: Script = count_on,
        *,
        vocab_size: int = 1000,
        context_len: int = 256,
        tokens: int = 4096,
        rows: int = 64,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.passes: list[tuple[str, int, int]] = []
        self.certainty = 1000.0
        """The logit of the script's token; all other logits are 0."""
        self.second: Callable[[int], int] | None = None
        """The second likeliest token, by the script's token; None for none."""
        self.on_pass: Callable[[int], object] = lambda _tokens: None
        """Called at the start of each pass with its number of tokens, to let a test's clock run."""
        self.failures: list[Exception] = []
        """Exceptions that the next passes raise, one each."""
        table = torch.zeros(1 + rows, context_len, dtype=torch.int32)
        self.rows = KVRows(table, context_len, np.arange(1, tokens + 1))
        self._told: dict[int, int] = {}  # the token id in each slot
        self.seen: Sequence[tuple[int, ...]] = ()
        """The sequence of each row of the latest pass."""
        self.states = torch.zeros(0, 1, dtype=torch.int64)
        """States of the latest pass, [n, 1], which are places in `seen`."""

    @property
    def read_tokens(self) -> int:
        """Number of tokens prefilled so far."""
        return sum(tokens for verb, _, tokens in self.passes if verb == "extend")

    def sequence(self, row: int, length: int | None = None) -> tuple[int, ...]:
        """The token ids in the row's KV, or the first `length` of them."""
        return tuple(self._told[slot] for slot in self.rows.slots(row)[:length].tolist())

    def extend(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        self._note("extend", rows, sum(map(len, token_ids)))
        added = self.rows.append(rows, [len(part) for part in token_ids])
        told = [token for part in token_ids for token in part]
        self._told.update(zip(added.slots.tolist(), told, strict=True))
        return self._say([self.sequence(row) for row in rows])

    def decode(self, given: PassInput, token_ids: torch.Tensor) -> torch.Tensor:
        rows, lengths = given.rows.tolist(), given.lengths.tolist()
        self._note("step", list(zip(rows, lengths, strict=True)), len(rows))
        self._told.update(zip(given.slots.tolist(), token_ids.tolist(), strict=True))
        return self._say([self.sequence(*each) for each in zip(rows, lengths, strict=True)])

    def _note(self, verb: str, rows: Sequence[object], tokens: int) -> None:
        if self.failures:
            raise self.failures.pop(0)
        if len(set(rows)) != len(rows):
            raise DraftModelError(f"rows {list(rows)} are not all different")
        self.passes.append((verb, len(rows), tokens))
        self.on_pass(tokens)

    def _say(self, sequences: Sequence[tuple[int, ...]]) -> torch.Tensor:
        self.states = torch.arange(len(sequences)).unsqueeze(1)
        self.seen = sequences
        logits = torch.zeros(len(sequences), self.vocab_size)
        for place, sequence in enumerate(sequences):
            token = self.script(sequence)
            if self.second is not None:
                logits[place, self.second(token)] = self.certainty / 2
            logits[place, token] = self.certainty
        return logits


def undecided() -> ScriptedModel:
    """A model with enough entropy that samples differ."""
    model = ScriptedModel()
    model.certainty = 7.0
    return model
