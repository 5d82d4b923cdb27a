"""Owns the prompts of a failed pass, which the drafter tries again one by one."""

from __future__ import annotations

from sglang_qspec.sidecar.batch_scheduler import DraftBatch
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.text import Completion, Text


class Retries:
    """Prompts that may have made a pass fail, and how far each must be drafted alone."""

    def __init__(self, rows: KVRows, queue: FairQueue, allocator: RowAllocator) -> None:
        self._rows = rows
        self._queue = queue
        self._allocator = allocator
        self._reach: dict[Text, dict[Completion, int]] = {}
        """For each prompt, its completions in the failed pass, with the length of KV that the pass
        would have reached, in tokens."""

    def __len__(self) -> int:
        return len(self._reach)

    def next(self) -> Text | None:
        """Return the next prompt to draft alone, and forget prompts that have left the queue."""
        for text in list(self._reach):
            if text in self._queue:
                return text
            del self._reach[text]
        return None

    def add(self, batch: DraftBatch) -> None:
        """Free all rows of the prompts in a failed pass, and note these prompts."""
        reach = {completion: len(completion) for completion in batch.completions}
        for text in {completion.text: None for completion in reach}:
            self._allocator.clear(text)
            self._reach.setdefault(text, {})
        for completion, size in reach.items():
            self._reach[completion.text][completion] = size

    def remove(self, text: Text) -> None:
        """Remove a prompt that failed alone."""
        del self._reach[text]

    def settle(self, text: Text) -> None:
        """Remove a prompt once passes over it alone have covered its part of the failed pass."""
        left = {
            completion: size
            for completion, size in self._reach[text].items()
            if not completion.finished
            and completion.shares
            and (completion.row is None or self._rows.length(completion.row) < size)
        }
        if left:
            self._reach[text] = left
        else:
            del self._reach[text]
