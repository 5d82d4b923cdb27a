"""Decode passes of the draft model that need nothing from the host in between.

In a burst each pass reads the tokens that the last pass chose, which stay on the device. Before the
first pass one copy takes everything else to the device, and after the last pass one copy takes the
tokens to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_qspec.messages import Candidates
from sglang_qspec.sidecar.draft_kv import DraftKV, PassInput
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.sampler import Sampler
from sglang_qspec.transfers import HostCopy, mark, to_device

MOST_PASSES = 16
"""Maximum number of passes in a burst on a GPU. What a burst costs the host is divided among them;
a row that ends by itself wastes those that follow."""
MOST_BURSTS = 4
"""Maximum number of bursts one after the other, of which each but the first is launched before the
host has the tokens of the last one. Then the drafter plans anew."""


class Drawn(NamedTuple):
    """The tokens of a burst."""

    token_ids: list[list[int]]
    """Those of each row, one for each pass that it took part in."""
    candidates: dict[int, Candidates]
    """As in `Choices`; empty unless the burst has one pass."""
    second_ids: dict[int, int]
    """As in `Choices`; empty unless the burst has one pass."""
    logits: torch.Tensor
    """Of the last pass, float [its rows, vocab]."""


class Burst:
    """The inputs of decode passes over some rows, in which row i takes part in the first ones."""

    def __init__(
        self,
        rows: KVRows,
        own: Sequence[int],
        token_ids: Sequence[int],
        counts: Sequence[int],
        more: Sequence[NDArray[np.generic]] = (),
    ) -> None:
        """Append `counts[i]` slots to the distinct row `own[i]`; `token_ids[i]` is its last token.

        The counts fall, so a pass has the first rows. `more` goes to the device in the same copy.
        Raises DraftModelError as `KVRows.append`.
        """
        added = rows.append(own, counts)
        passes = counts[0]
        self.sizes = [len(own)] * passes
        """Number of rows in each pass."""
        if counts[-1] < passes:
            self.sizes = (np.array(counts) > np.arange(passes)[:, None]).sum(1).tolist()
        if passes > 1:  # from row by row to pass by pass
            begins = np.repeat(np.cumsum(counts) - counts, counts)
            added = added.taken(np.argsort(np.arange(len(begins)) - begins, kind="stable"))
        self._host_rows, self._host_lengths = added.rows, added.positions + 1
        self._rows, self._positions, self._slots, self._lengths, self.token_ids, *self.more = (
            to_device(
                rows.table.device, *added, self._host_lengths, np.array(token_ids, np.int64), *more
            )
        )
        rows.place(self._rows, self._positions, self._slots)

    def inputs(self, number: int) -> PassInput:
        """The input of one pass, without its tokens."""
        begin = sum(self.sizes[:number])
        own = slice(begin, begin + self.sizes[number])
        return PassInput(
            self._rows[own],
            self._positions[own],
            self._slots[own],
            self._lengths[own],
            self._host_rows[own],
            self._host_lengths[own],
        )


class SinglePass:
    """The input of one decode pass in which a row may have several tokens."""

    def __init__(
        self, rows: KVRows, own: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Append `counts[i]` slots to the distinct row `own[i]`, for `token_ids` row by row.

        Raises DraftModelError as `KVRows.append`.
        """
        added = rows.append(own, counts)
        lengths = added.positions + 1
        own_rows, positions, slots, on_device, self.token_ids = to_device(
            rows.table.device, *added, lengths, np.array(token_ids, np.int64)
        )
        rows.place(own_rows, positions, slots)
        self.inputs = PassInput(own_rows, positions, slots, on_device, added.rows, lengths)


class Drawing:
    """A burst under way: its passes are launched one by one, and its tokens are read at its end."""

    def __init__(
        self,
        model: DraftKV,
        own: Sequence[int],
        token_ids: Sequence[int],
        counts: Sequence[int],
        sampler: Sampler,
        before: torch.Tensor | None = None,
    ) -> None:
        """Prepare a burst. `Burst` describes `own`, `token_ids` and `counts`.

        With `before`, `token_ids` are the places of the last tokens in `before`, int64 [n], which
        are on the device.
        """
        self._model, self._sampler, self._counts = model, sampler, counts
        self._burst = Burst(model.rows, own, token_ids, counts, sampler.arrays)
        sampler.put(self._burst.more)
        last = self._burst.token_ids
        self.tokens = last if before is None else before[last]
        """The tokens of the last launched pass, on the device."""
        self._found: list[torch.Tensor] = []
        self._waits: list[Callable[[], None]] = []
        self._copy: HostCopy | None = None

    def launch(self) -> None:
        """Launch the next pass."""
        number, sizes = len(self._found), self._burst.sizes
        self._logits = self._model.decode(self._burst.inputs(number), self.tokens[: sizes[number]])
        self.tokens = self._sampler.draw(self._logits, number)
        self._found.append(self.tokens)
        if len(sizes) > 1:
            self._waits.append(mark(self.tokens.device))

    def run(self, ends: Callable[[], bool] = lambda: False, *, queued: bool = False) -> bool:
        """Launch the passes that are left; False if the burst `ends` before.

        Before each further pass it asks whether the burst `ends`. It asks when the device has run
        the last pass, or with `queued` the pass before the last one, so that the device need not
        wait for the host.
        """
        sizes = self._burst.sizes
        while len(self._found) < len(sizes):
            number = len(self._found)
            if number > queued:
                self._waits[number - 1 - queued]()
            if number and ends():
                break
            self.launch()
        if len(sizes) > 1:
            self._copy = HostCopy(torch.cat(self._found))
        return len(self._found) == len(sizes)

    def read(self) -> Drawn:
        """Wait for the passes that `run` has launched, and return their tokens."""
        if self._copy is None:
            chosen = self._sampler.choices(self.tokens, self._logits)
            tokens = [[token] for token in chosen.token_ids]
            return Drawn(tokens, chosen.candidates, chosen.second_ids, self._logits)
        sizes = np.array(self._burst.sizes[: len(self._found)])
        by_pass = np.zeros((len(sizes), len(self._counts)), np.int64)
        by_pass[np.arange(len(self._counts)) < sizes[:, None]] = self._copy.read()
        by_row: list[list[int]] = by_pass.T.tolist()
        tokens = [row[:count] for row, count in zip(by_row, self._counts, strict=True)]
        return Drawn(tokens, {}, {}, self._logits)
