"""Selects the completions that the next pass of the draft model advances."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from sglang_qspec.link import Peer
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.text import Completion, Kind, Text

BESIDE_STEPS = 8
"""Maximum number of completions in a pass without step drafts, on a device where a larger pass is
slower, while the server has step drafts. The next step draft waits for this pass."""
READ_BESIDE_STEPS = 32
"""Maximum number of prompt tokens in a pass that BESIDE_STEPS limits."""
READ_ON_CPU, READ_ON_GPU = 256, 2048
"""Default of the maximum number of prompt tokens in a pass."""
SCARCE = 0.25
"""Share of free KV slots below which passes follow urgency alone."""
REACH = 4
"""Number of candidate completions considered for a pass, as a multiple of its slots."""


@dataclass
class DraftBatch:
    """Completions that a pass advances. All have KV rows, and KV slots for their new tokens."""

    prefill: list[Completion] = field(default_factory=list)
    """Completions that lack the KV of more than one token."""
    decode: list[Completion] = field(default_factory=list)
    """Completions that lack only the KV of their last token."""
    to_read: int = 0
    """Number of tokens that the `prefill` completions lack."""
    to_read_for: Counter[Peer] = field(default_factory=Counter)
    """`to_read` by server, so that long prompts of one server do not keep out prompts of
    another."""
    most_read: int = 0
    """Maximum number of `prefill` tokens in the pass."""

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode)

    def new_tokens(self, missing: int = 0) -> int:
        """Number of tokens that get KV in the pass, if a completion that lacks `missing` tokens
        joins."""
        decode, to_read = len(self.decode), self.to_read
        if missing == 1:
            decode += 1
        else:
            to_read += missing
        return decode + min(to_read, self.most_read)

    def add(self, completion: Completion, missing: int) -> None:
        """Add a completion that lacks the KV of `missing` tokens."""
        if missing == 1:
            self.decode.append(completion)
        else:
            self.prefill.append(completion)
            self.to_read += missing
            self.to_read_for[completion.text.owner] += missing

    @property
    def completions(self) -> list[Completion]:
        """All completions of the pass."""
        return [*self.prefill, *self.decode]


class BatchScheduler:
    """Fills passes with the most urgent completions that can be advanced."""

    def __init__(
        self,
        rows: KVRows,
        queue: FairQueue,
        allocator: RowAllocator,
        *,
        slots: int,
        prefill_tokens: int,
        apart: bool,
    ) -> None:
        """Use the settings that `Drafter` describes."""
        self._rows = rows
        self._queue = queue
        self._allocator = allocator
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        self._apart = apart

    def plan(self, alone: Text | None = None, *, by_worth: bool = False) -> DraftBatch | None:
        """Plan the next pass; None if its first completion alone is too large for the KV.

        With `alone`, the pass has only unfinished completions of that text. With `by_worth` the
        worthiest completions come first, otherwise the most urgent ones. These also come first
        while the KV is scarce, because completions lose their rows in the order of urgency.
        """
        roomy = self._rows.free_rows and self._rows.free_slots > SCARCE * self._rows.total_slots
        if by_worth and roomy and alone is None:
            batch = self._fill(itertools.islice(self._queue.worthiest(), REACH * self._slots))
            if batch and batch.new_tokens() <= self._rows.free_slots:
                return batch
        while True:
            batch = self._fill(self._candidates(alone))
            if batch and batch.new_tokens() <= self._rows.free_slots:
                return batch
            # The batch is the first completion alone, because `_fill` adds only what fits. So no
            # completion gets back the row that it gives up here, and the loop ends.
            if not self._allocator.make_room(self.first(alone)):
                return None

    def first(self, alone: Text | None) -> Completion:
        """The most urgent completion, which `plan` must advance."""
        return next(iter(self._candidates(alone)))

    def _candidates(self, alone: Text | None) -> Iterable[Completion]:
        if alone is not None:
            return [completion for completion in alone.completions if not completion.finished]
        return itertools.islice(self._queue.urgent(), REACH * self._slots)

    def _fill(self, candidates: Iterable[Completion]) -> DraftBatch:
        batch = DraftBatch(most_read=self._prefill_tokens)
        slots, leader = self._slots, None
        for completion in candidates:
            beside = self._apart and self._queue.live_steps[completion.text.owner] > 0
            if self._apart and leader is not None and completion.kind is not leader:
                break
            if beside and completion.kind is not Kind.STEP:
                slots = min(slots, BESIDE_STEPS)
                batch.most_read = min(batch.most_read, READ_BESIDE_STEPS)
            if len(batch) >= slots:
                break
            if completion.row is None:
                owner = completion.text.owner
                if batch.to_read_for[owner] >= batch.most_read or self._waits(completion, batch):
                    continue
                if not self._allocator.allocate(completion, batch.completions, batch.to_read):
                    break
                missing = self._allocator.missing(completion)
            else:
                missing = self._allocator.missing(completion)
                if batch and not self._fits(completion, missing, batch):
                    break
            batch.add(completion, missing)
            leader = completion.kind
        return batch

    def _fits(self, completion: Completion, missing: int, batch: DraftBatch) -> bool:
        """Make room in the KV for a completion with a row, besides `batch`; False without room."""
        while batch.new_tokens(missing) > self._rows.free_slots:
            if not self._allocator.make_room(completion, batch.completions):
                return False
        return True

    def _waits(self, completion: Completion, batch: DraftBatch) -> bool:
        """Whether this completion waits for KV that a completion in prefill will soon have."""
        first = completion.text.completions[0]
        if completion is not first and not first.finished and not first.token_ids:
            return True  # all completions of a prompt begin after its prefill
        return self._allocator.will_share(completion, batch.prefill)
