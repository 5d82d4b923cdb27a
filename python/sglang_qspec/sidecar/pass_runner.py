"""Runs the passes of the draft model, and owns their statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from sglang_qspec.errors import DraftModelError
from sglang_qspec.link import Peer
from sglang_qspec.messages import Candidates
from sglang_qspec.sidecar.batch_scheduler import BatchScheduler, DraftBatch
from sglang_qspec.sidecar.burst import Drawing, SinglePass
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.guesser import GuessedPass, Guesser
from sglang_qspec.sidecar.outbox import Outbox
from sglang_qspec.sidecar.pass_statistics import PassStatistics
from sglang_qspec.sidecar.quota import Quota
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.sampler import Sampler
from sglang_qspec.sidecar.sampling import GREEDY
from sglang_qspec.sidecar.text import Completion, Kind, Text
from sglang_qspec.transfers import to_device

Value = TypeVar("Value")

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
        *,
        most_passes: int = 1,
        most_bursts: int = 1,
        guesser: Guesser | None = None,
    ) -> None:
        """Run at most `most_bursts` bursts in a row, of `most_passes` decode passes at most.

        A pass that is not part of a longer burst also verifies guesses of the `guesser`.
        """
        self._model = model
        self._most_passes = most_passes
        self._most_bursts = most_bursts
        self._rows = model.rows
        self._queue = queue
        self._allocator = allocator
        self._scheduler = scheduler
        self._quota = quota
        self._outbox = outbox
        self._guesser = guesser
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

    def run(self, batch: DraftBatch, ends: Callable[[], bool]) -> None:
        """Run the prefill of a batch, then its decode passes. Errors of the model pass through.

        A batch without prefill has bursts of several decode passes, until it `ends`.
        """
        self.advanced = len(batch)
        self._read = len(batch.decode) + min(batch.to_read, batch.most_read)
        if batch.prefill:
            self._prefill(batch.prefill, batch.most_read)
        if batch.decode:
            self._decode(batch.decode, 1 if batch.prefill else self._most_passes, ends)

    def charge(self) -> None:
        """Charge the servers for the time of a pass that succeeded, and record it."""
        seconds = time.monotonic() - self._began
        self._queue.charge(self._computed, seconds)
        self.statistics.observe_pass(self._tokens, seconds)
        self.statistics.observe_reading(self.advanced, self._read, seconds)
        if self._step_tokens:
            self.statistics.observe_step(
                self.advanced, self._step_tokens, self._read, seconds, drafted=self._tokens
            )

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
            Sampler([GREEDY], [0], [0]).choose(self._model.extend([row], [[0]]))
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
        if not complete:
            return
        places = [place for place, _ in complete]
        if len(complete) < len(rows):
            logits = logits[to_device(logits.device, np.array(places))[0]]
        grown = [completion for _, completion in complete]
        self._branch(grown, logits)
        self._choose(grown, logits)
        if self._guesser is not None:
            self._guesser.guess(grown, self._model.states[places])

    def _decode(self, completions: list[Completion], most: int, ends: Callable[[], bool]) -> None:
        """Run bursts of at most `most` passes, in which a completion takes part up to its limit.

        The tokens of a burst are appended beside the first pass of the next one.

        A pass with step drafts is a burst of its own: a target may wait for each of their tokens,
        and its next commit may end the draft. While a server has step drafts, no pass is queued
        behind the present one, because commits would wait for both.
        """
        if most > 1 and any(each.kind is Kind.STEP or _others(each) for each in completions):
            most = 1
        most = max(1, min(most, self._rows.free_slots // len(completions)))
        if most == 1 and self._guesser is not None:
            self._verify(completions, self._guesser)
            return
        counts = [1] * len(completions)
        if most > 1:
            completions = sorted(completions, key=_left, reverse=True)
            counts = [min(most, _left(completion)) for completion in completions]
        self._computed.update(completion.text.owner for completion in completions)
        queued = not any(self._queue.live_steps.values())
        own, last = _rows_of(completions), [completion.last for completion in completions]
        drawing = Drawing(self._model, own, last, counts, _sampler(completions, counts[0]))
        for left in reversed(range(self._most_bursts)):
            complete = drawing.run(ends, queued=queued)
            following = None
            if left and complete and queued and counts[0] > 1 and not ends():
                following = self._follow(drawing, completions, counts)
            drawn = drawing.read()
            if most == 1:
                self._branch(completions, drawn.logits)
            go_on = following is not None
            self._append(
                completions,
                drawn.token_ids,
                _listed(drawn.candidates),
                _listed(drawn.second_ids),
                go_on=go_on,
            )
            if following is None:
                break
            drawing, completions, counts = following

    def _verify(self, completions: Sequence[Completion], guesser: Guesser) -> None:
        """Run a decode pass over the newest token of each completion, and over guesses behind it.

        Where the token behind the newest one is the guess, the completion grows by the token behind
        the guess, too.
        """
        room = max(0, self._rows.free_slots - len(completions))
        rows = GuessedPass(completions, guesser.chosen(completions, room))
        self._read += len(rows.token_ids) - len(completions)
        self._computed.update(completion.text.owner for completion in rows.completions)
        began = time.monotonic()
        given = SinglePass(self._rows, _rows_of(completions), rows.counts, rows.token_ids)
        logits = self._model.decode(given.inputs, given.token_ids)
        chosen = _sampler(rows.completions, ahead=rows.ahead).choose(logits)
        guesser.choice.observe_pass(len(rows.token_ids), time.monotonic() - began)
        right = rows.are_right(chosen.token_ids)
        guesser.judge(rows.guesses, right)
        self.statistics.guessed_tokens += len(rows.token_ids) - len(completions)
        self.statistics.right_guesses += sum(right)
        grown = [range(row, row + 1 + more) for row, more in zip(rows.firsts, right, strict=True)]
        states = self._model.states[[own[-1] for own in grown]]
        self._branch(completions, logits, rows.firsts)
        self._append(
            completions,
            [[chosen.token_ids[row] for row in own] for own in grown],
            _of_rows(chosen.candidates, grown),
            _of_rows(chosen.second_ids, grown),
        )
        guesser.guess(completions, states)

    def _follow(
        self, drawing: Drawing, completions: Sequence[Completion], counts: Sequence[int]
    ) -> tuple[Drawing, list[Completion], list[int]] | None:
        """Launch the first pass of the next burst, before the tokens of this one are read.

        Completions that have ended by these tokens waste their part in it. Returns the burst, its
        completions and their numbers of passes; None if other completions wait, or if too little is
        left to draft.
        """
        ahead, known = counts[0], set(completions)
        if any(each not in known for each in islice(self._queue.urgent(), len(known) + 1)):
            return None
        places = [
            place
            for place, each in enumerate(completions)
            if counts[place] == ahead and _left(each) > ahead and not each.finished
        ]
        most = min(self._most_passes, self._rows.free_slots // max(1, len(places)))
        going = [completions[place] for place in places]
        further = [min(most, _left(each) - ahead) for each in going]
        if max(further, default=0) < 2:
            return None
        sampler = _sampler(going, further[0], [ahead] * len(going))
        following = Drawing(
            self._model, _rows_of(going), places, further, sampler, before=drawing.tokens
        )
        following.launch()
        return following, going, further

    def _branch(
        self,
        completions: Sequence[Completion],
        logits: torch.Tensor,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Begin the other completions of prompts that have just been read, from their `logits`.

        These are float [n, vocab]; `rows` are those after the last token of each of the
        `completions`, by default one after the other.
        """
        for first, row in zip(completions, rows or range(len(completions)), strict=True):
            others = _others(first)
            if others and first.row is not None:
                self._allocator.keep(first.text, first)
                self._choose(others, logits[row].expand(len(others), -1))

    def _choose(self, completions: list[Completion], logits: torch.Tensor) -> None:
        """Append a token to each completion, from the `logits` float [n, vocab] after its last."""
        chosen = _sampler(completions).choose(logits)
        tokens = [[token] for token in chosen.token_ids]
        self._append(completions, tokens, _listed(chosen.candidates), _listed(chosen.second_ids))

    def _append(
        self,
        completions: Sequence[Completion],
        token_ids: Sequence[list[int]],
        candidates: Mapping[int, Sequence[Candidates]],
        second_ids: Mapping[int, Sequence[int]],
        *,
        go_on: bool = False,
    ) -> None:
        """Append tokens to each unfinished completion: all of them, or those up to its end.

        Their `candidates` and `second_ids` are given by the place of the completion. Rows that
        `go_on` take part in the next burst, and have KV slots for it.
        """
        drafted = self._tokens
        for place, (completion, tokens) in enumerate(zip(completions, token_ids, strict=True)):
            if completion.finished:  # by a token of the last burst
                continue
            text, before = completion.text, len(completion.token_ids)
            is_step = completion.kind is Kind.STEP
            kept, ended = len(tokens), not text.stops.isdisjoint(tokens)
            if ended:
                kept = 1 + next(i for i, token in enumerate(tokens) if token in text.stops)
            if not is_step:
                room = self._quota.room_for_drafts(text.owner)
                if room <= kept:
                    kept, ended = max(1, room), True
                self._quota.add_drafts(text.owner, kept)
            size = before + kept
            self._tokens += kept
            self._step_tokens += kept * is_step
            completion.aims.frombytes(completion.aim.packed(kept))
            completion.token_ids.extend(tokens[:kept])
            ended = ended or size >= text.limit
            row = completion.row
            if row is not None and (ended or not go_on):
                self._rows.truncate(row, min(self._rows.length(row), len(completion) - 1))
            if place in candidates:
                completion.candidates += candidates[place][:kept]
            if is_step and place in second_ids:
                completion.second_ids += second_ids[place][:kept]
            if ended:
                if completion.kind is Kind.FIRST:
                    self.statistics.observe_length(size)
                self.finish(completion)
            elif is_step or not before or size // FLUSH_TOKENS > before // FLUSH_TOKENS:
                self._outbox.extend(completion.news())
        self.statistics.drafted_tokens += self._tokens - drafted


def _rows_of(completions: Sequence[Completion]) -> list[int]:
    return [completion.row for completion in completions if completion.row is not None]


def _sampler(
    completions: Sequence[Completion], passes: int = 1, ahead: Sequence[int] | None = None
) -> Sampler:
    """The sampling of the tokens of completions in the next `passes`.

    Each is behind a number of tokens that the completion does not have yet, `ahead`; None for 0.
    """
    ahead = ahead or [0] * len(completions)
    return Sampler(
        [completion.sampling for completion in completions],
        [completion.seed for completion in completions],
        [each.position + number for each, number in zip(completions, ahead, strict=True)],
        [completion.text.owner.vocab_size for completion in completions],
        passes,
        seconds=any(completion.kind is Kind.STEP for completion in completions),
    )


def _listed(values: Mapping[int, Value]) -> dict[int, list[Value]]:
    """What a pass gave for rows of one token each, as lists."""
    return {row: [value] for row, value in values.items()}


def _of_rows(values: Mapping[int, Value], rows: Sequence[range]) -> dict[int, list[Value]]:
    """What a pass gave for several rows of each completion, by the completion's place."""
    return {
        place: [values[row] for row in own]
        for place, own in enumerate(rows)
        if all(row in values for row in own)
    }


def _left(completion: Completion) -> int:
    """Number of tokens that the completion may still get."""
    return completion.text.limit - len(completion.token_ids)


def _others(first: Completion) -> list[Completion]:
    """The completions that begin with the first token of this one."""
    text = first.text
    if first.token_ids or first is not text.completions[0]:
        return []
    return [c for c in text.completions[1:] if not c.finished and not c.token_ids]
