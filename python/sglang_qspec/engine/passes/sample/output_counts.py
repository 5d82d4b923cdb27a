"""Counts the output tokens of requests on the device of the passes.

A pass sends only the tokens that are new since the request's last pass, so the cost of a pass does
not grow with the length of the outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_qspec.engine.passes.outputs import output_of

_SMALLEST = 64
"""Minimum number of allocated columns."""


class _Record:
    """The part of one request's output that the device has counted."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.length = 0
        """Number of counted output tokens."""
        self.columns: dict[int, int] = {}
        """Column of each distinct token."""
        self.counts: Counter[int] = Counter()


class Changes(NamedTuple):
    """New entries of the counts of some requests, on the host."""

    slots: NDArray[np.int64]
    """int64 [n]: slot of each request."""
    entries: NDArray[np.int64]
    """int64 [4, m]: slot, column, token and count of each changed entry."""
    used: NDArray[np.int64]
    """int64 [n]: number of distinct tokens of each request."""


class OutputCounts:
    """Distinct output tokens of requests with their counts, one slot for each request.

    SGLang's request object identifies a request. When the object is deleted, its slot becomes free.
    If an output has become shorter, all of it is counted again.
    """

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, 0, device=device)
        self._records: WeakKeyDictionary[Any, _Record] = WeakKeyDictionary()
        self._free: list[int] = []
        self._slots = 0

    def read(self, reqs: Sequence[Any]) -> Changes:
        """Count the new output tokens of the requests, and return the changes for `write`."""
        entries: list[tuple[int, int, int, int]] = []
        records = [self._record(req) for req in reqs]
        for req, record in zip(reqs, records, strict=True):
            new = output_of(req)[record.length :]
            if not record.length and not len(new):
                # The slot may still hold tokens of an earlier request.
                entries.append((record.slot, 0, 0, 0))
            record.counts.update(new)
            record.length += len(new)
            for token in dict.fromkeys(new):
                column = record.columns.setdefault(token, len(record.columns))
                entries.append((record.slot, column, token, record.counts[token]))
        return Changes(
            np.array([record.slot for record in records], np.int64),
            np.array(entries, np.int64).reshape(-1, 4).T,
            np.array([len(record.columns) for record in records], np.int64),
        )

    def write(
        self, slots: Tensor, entries: Tensor, used: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:
        """Apply staged changes. Returns tokens int64 and counts float32 of the slots, [n, K].

        The arguments are the fields of `Changes` on the device. K is `most`, the largest of `used`,
        but at least 1. Columns beyond a request's own repeat its first column.
        """
        self._reserve(most)
        at = (entries[0], entries[1])
        self._ids.index_put_(at, entries[2])
        self._counts.index_put_(at, entries[3].float())
        columns = torch.arange(max(1, most), device=slots.device)
        columns = torch.where(columns < used.unsqueeze(1), columns, 0)
        rows = slots.unsqueeze(1)
        return self._ids[rows, columns], self._counts[rows, columns]

    def _record(self, req: Any) -> _Record:
        record = self._records.get(req)
        if record is not None and record.length <= len(output_of(req)):
            return record
        if record is None:
            if not self._free:
                self._free.append(self._slots)
                self._slots += 1
            slot = self._free.pop()
            finalize(req, self._free.append, slot)
        else:
            slot = record.slot
        self._records[req] = record = _Record(slot)
        return record

    def _reserve(self, columns: int) -> None:
        """Enlarge the tensors to all slots and to `columns`, to powers of two."""
        rows, width = self._ids.shape
        if self._slots <= rows and columns <= width and width:
            return
        more = (_power(self._slots) - rows, max(width, _power(max(columns, _SMALLEST))) - width)
        padding = (0, more[1], 0, max(0, more[0]))
        self._ids = torch.nn.functional.pad(self._ids, padding)
        self._counts = torch.nn.functional.pad(self._counts, padding)


def _power(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()
