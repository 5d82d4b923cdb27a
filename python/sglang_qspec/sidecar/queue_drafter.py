"""Drafts what servers ask for, many completions at a time, the most urgent first.

Each step decodes one token of the first `slots` unfinished completions in the order of `Line`. A
newcomer therefore overtakes: a completion that no longer belongs to the first is paused, keeps its
row, and goes on later.
"""

from __future__ import annotations

import itertools
import time

import torch

from sglang_qspec.link import Peer
from sglang_qspec.messages import Admit, Close, Commits, Drafted, Submit
from sglang_qspec.sidecar.line import Line
from sglang_qspec.sidecar.planner import Planner
from sglang_qspec.sidecar.prompt import Completion, Kind, Prompt, Subscriber, prompt_key
from sglang_qspec.sidecar.rows import Rows
from sglang_qspec.sidecar.sampling import choose
from sglang_qspec.sidecar.step_drafter import StepDrafter
from sglang_qspec.sidecar.step_times import StepTimes
from sglang_qspec.sidecar.tenancy import Tenancy

FLUSH_TOKENS = 4
"""A completion's tokens are sent in pieces of so many; its first one, and steps, at once."""


class QueueDrafter:
    """Turns requests into drafts with a model. One thread calls it."""

    def __init__(
        self,
        model: Rows,
        *,
        slots: int = 64,
        max_completion_tokens: int = 512,
        prefill_tokens: int = 256,
        apart: bool = False,
    ) -> None:
        """`slots`: completions decoded in one pass. `prefill_tokens`: prompt tokens in one pass,
        between two of which the running completions advance by one token. `apart`: steps, first
        completions and others do not share passes, since a larger pass is a slower one."""
        self._model = model
        self._max_completion_tokens = max_completion_tokens
        self._line = Line()
        self._tenancy = Tenancy(model, self._line)
        self._planner = Planner(
            model,
            self._line,
            self._tenancy,
            slots=slots,
            prefill_tokens=prefill_tokens,
            apart=apart,
        )
        self._steps = StepDrafter(model, self._line, self._tenancy)
        self._arrivals = itertools.count()
        self._wanted: dict[Subscriber, Prompt] = {}
        self._outbox: list[tuple[Peer, Drafted]] = []
        self.drafted_tokens = 0
        """Tokens drafted so far."""
        self.step_times = StepTimes()
        self._advanced = 0
        self._step_tokens = 0
        self._read = 0

    @property
    def requests(self) -> int:
        """Requests with unfinished completions."""
        return sum(not p.finished or p.stepping(s) for s, p in self._wanted.items())

    @property
    def rows(self) -> int:
        """Completions that the last step advanced; none once there is nothing to do."""
        return 0 if self.idle else self._advanced

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return not self._line

    def submit(self, peer: Peer, message: Submit) -> None:
        """Draft for a request; a repeated one starts anew.

        A prompt that does not fit the model is answered with finished completions, all empty.
        """
        subscriber = (peer, message.rid, message.serial)
        self._leave(subscriber)
        limit = self._limit(message)
        key = prompt_key(message, limit)
        prompt = self._line.prompts.get(key)
        if prompt is None:
            eos = frozenset() if message.ignore_eos else self._model.eos_token_ids
            prompt = Prompt.submitted(key, message, eos.union(message.stop_token_ids), limit)
            self._line.add(prompt)
        place = (message.rank, next(self._arrivals))
        prompt.subscribe(subscriber, message.base_len, place, message.dice)
        self._line.arrange(prompt)
        self._wanted[subscriber] = prompt
        for completion in prompt.completions:
            self._outbox += prompt.news(completion)

    def admit(self, peer: Peer, message: Admit) -> None:
        """The request is served now: draft for it behind those that wait."""
        subscriber = (peer, message.rid, message.serial)
        prompt = self._wanted.get(subscriber)
        if prompt is not None:
            prompt.subscriptions[subscriber].place = None
            self._line.arrange(prompt)

    def follow(self, peer: Peer, message: Commits) -> None:
        """Draft on from what these requests have committed; those not known are ignored."""
        for commit in message.requests:
            subscriber = (peer, commit.rid, commit.serial)
            prompt = self._wanted.get(subscriber)
            if prompt is not None:
                self._outbox += self._steps.follow(subscriber, prompt, commit)
                for completion in prompt.overtaken():
                    self._finish(completion)

    def close(self, peer: Peer, message: Close) -> None:
        """Stop drafting for a request; one that is not known is ignored."""
        self._leave((peer, message.rid, message.serial))

    def drop(self, peer: Peer) -> None:
        """Stop drafting for all requests of a server that has gone."""
        for subscriber in [s for s in self._wanted if s[0] == peer]:
            self._leave(subscriber)

    def take(self) -> list[tuple[Peer, Drafted]]:
        """What is to be sent, and to whom; it is handed out once."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def step(self) -> None:
        """Advance the most urgent completions by one token, and new prompts by a piece."""
        began, self._step_tokens = time.monotonic(), 0
        self._advance()
        if self._step_tokens:
            seconds = time.monotonic() - began
            self.step_times.observe(self._advanced, self._step_tokens, self._read, seconds)

    def _advance(self) -> None:
        self._advanced = 0
        while (plan := self._planner.plan()) is None:
            self._finish(next(self._line.urgent()))  # with what it has
            if self.idle:
                return
        self._advanced = len(plan)
        self._read = len(plan.decode) + min(plan.to_read, plan.most_read)
        if plan.prefill:
            self._prefill(plan.prefill, plan.most_read)
        if plan.decode:
            rows = [completion.row for completion in plan.decode if completion.row is not None]
            last = [completion.tail(len(completion) - 1, 1)[0] for completion in plan.decode]
            self._grow(plan.decode, self._model.step(rows, last))

    def abandon(self) -> None:
        """End all unfinished completions as they are; after a pass that failed half-way."""
        for completion in list(self._line.urgent()):
            self._finish(completion)

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, completions and rows belong together."""
        self._line.check_integrity()
        self._tenancy.check_integrity()
        assert set(self._wanted.values()) == set(self._line.prompts.values())
        subscribers = [s for p in self._line.prompts.values() for s in p.subscriptions]
        assert sorted(map(hash, subscribers)) == sorted(map(hash, self._wanted))

    def _limit(self, message: Submit) -> int:
        """Tokens that a completion may have; 0 if the prompt does not fit."""
        size = len(message.token_ids)
        if not 0 < size < self._model.total_tokens:
            return 0
        room = self._model.context_len - size
        return max(0, min(message.max_new_tokens, self._max_completion_tokens, room))

    def _leave(self, subscriber: Subscriber) -> None:
        prompt = self._wanted.pop(subscriber, None)
        if prompt is None:
            return
        self._steps.withdraw(prompt.subscriptions.pop(subscriber))
        if prompt.subscriptions:
            self._line.arrange(prompt)
        else:
            self._tenancy.clear(prompt)
            self._line.remove(prompt)

    def _prefill(self, completions: list[Completion], budget: int) -> None:
        """Read `budget` tokens of prompts, the most urgent first; draft where one is complete."""
        rows: list[int] = []
        parts: list[list[int]] = []
        complete: list[tuple[int, Completion]] = []
        for completion in completions:
            if completion.row is None or budget == 0:
                break
            part = completion.tail(self._model.length(completion.row), budget)
            budget -= len(part)
            if len(part) == self._tenancy.missing(completion):
                complete.append((len(rows), completion))
            rows.append(completion.row)
            parts.append(part)
        logits = self._model.extend(rows, parts)
        for place, completion in complete:
            self._grow([completion], logits[place : place + 1])

    def _grow(self, completions: list[Completion], logits: torch.Tensor) -> None:
        """Append a token to each completion: `logits` float [n, vocab] follow their last ones."""
        for place, completion in enumerate(completions):
            if completion.index == 0 and not completion.token_ids:
                self._branch(completion, logits[place : place + 1])
        self._append(completions, logits)

    def _branch(self, greedy: Completion, logits: torch.Tensor) -> None:
        """A prompt is read, with `logits` [1, vocab] at its end: begin all its completions."""
        others = [c for c in greedy.prompt.completions[1:] if not c.finished and not c.token_ids]
        if others and greedy.row is not None:
            self._tenancy.keep(greedy.prompt, greedy.row)
            self._append(others, logits.expand(len(others), -1))

    def _append(self, completions: list[Completion], logits: torch.Tensor) -> None:
        chosen = choose(
            logits,
            [completion.sampling for completion in completions],
            [completion.seed for completion in completions],
            [completion.position for completion in completions],
        )
        self.drafted_tokens += len(completions)
        for place, completion in enumerate(completions):
            prompt, token = completion.prompt, chosen.token_ids[place]
            self._step_tokens += completion.kind is Kind.STEP
            completion.token_ids.append(token)
            if place in chosen.candidates:
                completion.candidates.append(chosen.candidates[place])
            size = len(completion.token_ids)
            if token in prompt.stops or size >= prompt.limit:
                self._finish(completion)
            elif size == 1 or size % FLUSH_TOKENS == 0 or completion.kind is Kind.STEP:
                self._outbox += prompt.news(completion)

    def _finish(self, completion: Completion) -> None:
        self._line.finish(completion)
        self._tenancy.vacate(completion)
        self._outbox += completion.prompt.news(completion)
