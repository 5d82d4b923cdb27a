"""Runs the passes of the draft model, and owns their statistics."""

from __future__ import annotations

import time
from collections import Counter

import torch

from sglang_qspec.errors import DraftModelError
from sglang_qspec.link import Peer
from sglang_qspec.sidecar.batch_scheduler import BatchScheduler, DraftBatch
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.outbox import Outbox
from sglang_qspec.sidecar.pass_statistics import PassStatistics
from sglang_qspec.sidecar.quota import Quota
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.sampling import GREEDY, choose, choose_shared, rows_of
from sglang_qspec.sidecar.text import Completion, Kind, Text

FLUSH_TOKENS = 4
"""Number of tokens in one message of a completion. The first token, and the tokens of step drafts,
are sent at once."""


class PassRunner:
    """Runs planned passes and appends their tokens to the completions."""

    def __init__(
        self,
        model: DraftKV,
        queue: FairQueue,
        allocator: RowAllocator,
        scheduler: BatchScheduler,
        quota: Quota,
        outbox: Outbox,
    ) -> None:
        self._model = model
        self._rows = model.rows
        self._queue = queue
        self._allocator = allocator
        self._scheduler = scheduler
        self._quota = quota
        self._outbox = outbox
        self.statistics = PassStatistics()
        self.advanced = 0
        """Number of completions that the latest pass advanced."""
        self._began = 0.0
        """Clock time of the start of the pass, in seconds."""
        self._computed: Counter[Peer] = Counter()
        """Number of tokens that the pass computed for each server."""
        self._tokens = 0
        """Number of tokens that the pass drafted."""
        self._step_tokens = 0
        """Number of step draft tokens among them."""
        self._read = 0
        """Number of tokens that the pass computes KV for."""

    def begin(self) -> None:
        """Start the clock and the counters of a pass."""
        self._began, self.advanced = time.monotonic(), 0
        self._tokens = self._step_tokens = 0
        self._computed.clear()

    def plan(self, retried: Text | None, *, by_worth: bool = False) -> DraftBatch | None:
        """Plan the next pass, and finish completions that are too large for the KV.

        With `retried` the pass has only completions of that prompt, and `by_worth` is as in
        `BatchScheduler.plan`. Returns None if nothing is left to draft.
        """
        while self._queue and (retried is None or retried in self._queue):
            batch = self._scheduler.plan(retried, by_worth=by_worth)
            if batch is not None:
                return batch
            self.finish(self._scheduler.first(retried))
        return None

    def run(self, batch: DraftBatch) -> None:
        """Run the prefill of a batch, then its decode step. Errors of the model pass through."""
        self.advanced = len(batch)
        self._read = len(batch.decode) + min(batch.to_read, batch.most_read)
        if batch.prefill:
            self._prefill(batch.prefill, batch.most_read)
        if batch.decode:
            self._computed.update(completion.text.owner for completion in batch.decode)
            rows = [completion.row for completion in batch.decode if completion.row is not None]
            last = [completion.tail(len(completion) - 1, 1)[0] for completion in batch.decode]
            self._grow(batch.decode, self._model.step(rows, last))

    def charge(self) -> None:
        """Charge the servers for the time of a pass that succeeded, and record it."""
        seconds = time.monotonic() - self._began
        self._queue.charge(self._computed, seconds)
        self.statistics.observe_pass(self._tokens, seconds)
        if self._step_tokens:
            self.statistics.observe_step(self.advanced, self._step_tokens, self._read, seconds)

    def finish(self, completion: Completion) -> None:
        """End a completion, release its row and send the rest of its tokens."""
        self._queue.finish(completion)
        self._allocator.release(completion)
        self._outbox.extend(completion.news())

    def works(self) -> bool:
        """Whether the model can still run a pass, tested with a single token."""
        if not (self._rows.free_rows and self._rows.free_slots):
            return False
        row = self._rows.open()
        try:
            choose(self._model.extend([row], [[0]]), [GREEDY], [0], [0])
        except (DraftModelError, RuntimeError):  # torch raises RuntimeError
            return False
        finally:
            self._rows.close(row)
        return True

    def _prefill(self, completions: list[Completion], budget: int) -> None:
        """Prefill up to `budget` prompt tokens, the most urgent completions first.

        Each server with prompts to prefill gets an equal part of the budget. A completion with its
        prefill complete gets its next token.
        """
        owners = {completion.text.owner for completion in completions}
        left = dict.fromkeys(owners, max(1, budget // len(owners)))
        rows: list[int] = []
        parts: list[list[int]] = []
        complete: list[tuple[int, Completion]] = []
        for completion in completions:
            owner = completion.text.owner
            most = min(budget, left[owner])
            if completion.row is None or most == 0:
                continue
            part = completion.tail(self._rows.length(completion.row), most)
            budget -= len(part)
            left[owner] -= len(part)
            self._computed[owner] += len(part)
            if len(part) == self._allocator.missing(completion):
                complete.append((len(rows), completion))
            rows.append(completion.row)
            parts.append(part)
        logits = self._model.extend(rows, parts)
        if complete:
            places = [place for place, _ in complete]
            self._grow([completion for _, completion in complete], rows_of(logits, places))

    def _grow(self, completions: list[Completion], logits: torch.Tensor) -> None:
        """Append a token to each completion, from the `logits` after its last token.

        `logits` is float [n, vocab].
        """
        for place, completion in enumerate(completions):
            if completion is completion.text.completions[0] and not completion.token_ids:
                self._branch(completion, logits[place : place + 1])
        self._append(completions, logits)

    def _branch(self, first: Completion, logits: torch.Tensor) -> None:
        """Begin the other completions of a prefilled prompt, from its last `logits` [1, vocab]."""
        others = [c for c in first.text.completions[1:] if not c.finished and not c.token_ids]
        if others and first.row is not None:
            self._allocator.keep(first.text, first)
            self._append(others, logits.expand(len(others), -1))

    def _append(self, completions: list[Completion], logits: torch.Tensor) -> None:
        chosen = choose_shared(
            logits,
            [completion.sampling for completion in completions],
            [completion.seed for completion in completions],
            [completion.position for completion in completions],
            [completion.text.owner.vocab_size for completion in completions],
        )
        self.statistics.drafted_tokens += len(completions)
        self._tokens += len(completions)
        for place, completion in enumerate(completions):
            text, token = completion.text, chosen.token_ids[place]
            is_step = completion.kind is Kind.STEP
            self._step_tokens += is_step
            completion.aims.append(completion.aim.pack())
            completion.token_ids.append(token)
            if place in chosen.candidates:
                completion.candidates.append(chosen.candidates[place])
            size = len(completion.token_ids)
            if not is_step:
                self._quota.add_drafts(text.owner, 1)
            full = not is_step and not self._quota.has_room_for_drafts(text.owner)
            if token in text.stops or size >= text.limit or full:
                if completion.kind is Kind.FIRST:
                    self.statistics.observe_length(size)
                self.finish(completion)
            elif size == 1 or size % FLUSH_TOKENS == 0 or is_step:
                self._outbox.extend(completion.news())
