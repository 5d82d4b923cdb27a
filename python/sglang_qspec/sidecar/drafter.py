"""Drafts the submissions of all servers in batches, the most urgent completions first.

Each step decodes one token for the first `slots` unfinished completions in the order of `Turns`. A
new completion can displace a less urgent one, which pauses, keeps its KV row, and continues later.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import torch

from sglang_qspec.config import MAX_COMPLETIONS, MAX_SERVER_TOKENS
from sglang_qspec.errors import DraftModelError, PromptError
from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Admit,
    Close,
    Commit,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    Submit,
    ToSidecar,
)
from sglang_qspec.sidecar.batch_scheduler import BatchScheduler, Plan
from sglang_qspec.sidecar.completion import Completion, Kind
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.prompt import Prompt, prompt_key
from sglang_qspec.sidecar.quota import Quota
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.sampling import GREEDY, choose
from sglang_qspec.sidecar.step_drafter import StepDrafter
from sglang_qspec.sidecar.step_times import StepTimes
from sglang_qspec.sidecar.subscription import Share, Subscriber
from sglang_qspec.sidecar.turns import Turns

FLUSH_TOKENS = 4
"""Number of tokens in one message of a completion. The first token, and the tokens of step drafts,
are sent at once."""
RETRY_S = 0.1
"""Time, in seconds, after which messages that did not fit a server's queue are sent again."""


class Drafter:
    """Drafts completions and steps for the requests of all servers. One thread calls it."""

    def __init__(
        self,
        model: DraftKV,
        *,
        slots: int = 64,
        max_completion_tokens: int = 512,
        prefill_tokens: int = 256,
        apart: bool = False,
        share: bool = False,
        max_server_tokens: int = MAX_SERVER_TOKENS,
    ) -> None:
        """Set the limits of a pass and what passes and servers share.

        `slots` is the maximum number of completions in one pass, and `prefill_tokens` the maximum
        number of prompt tokens. With `apart`, step drafts, first completions, other completions and
        servers do not share passes, because a larger pass is slower on a CPU. With `share`, equal
        prompts of several servers are drafted once and share their KV. `max_server_tokens` limits
        the text tokens, and separately the draft tokens, kept for one server.
        """
        self._model = model
        self._max_completion_tokens = max_completion_tokens
        self._share = share
        self._quota = Quota(min(model.context_len, model.total_tokens), max_server_tokens)
        self._turns = Turns(apart=apart)
        self._allocator = RowAllocator(model, self._turns, share=share)
        self._scheduler = BatchScheduler(
            model,
            self._turns,
            self._allocator,
            slots=slots,
            prefill_tokens=prefill_tokens,
            apart=apart,
        )
        self._steps = StepDrafter(model, self._turns, self._allocator)
        self._arrivals = itertools.count()
        self._wanted: dict[Subscriber, Prompt] = {}
        self._suspects: dict[Prompt, dict[Completion, int]] = {}
        """Prompts of a failed pass, which are tried again one by one. For each, its completions in
        the pass, with the length of KV that the pass would have reached, in tokens."""
        self._undelivered: dict[Share, Subscriber] = {}
        """Shares with a message that the link did not take; its tokens are sent again."""
        self._retry_at = 0.0
        self._outbox: list[tuple[Peer, FromSidecar]] = []
        self.drafted_tokens = 0
        """Number of tokens drafted since the start."""
        self.step_times = StepTimes()
        self._advanced = 0
        self._computed: Counter[Peer] = Counter()
        """Number of tokens that the current pass computed for each server."""
        self._step_tokens = 0
        self._read = 0

    @property
    def requests(self) -> int:
        """Number of requests with unfinished completions or step drafts."""
        return sum(prompt.subscriptions[s].busy for s, prompt in self._wanted.items())

    @property
    def texts(self) -> int:
        """Number of distinct prompts that are kept."""
        return len(self._turns.prompts)

    @property
    def rows(self) -> int:
        """Number of completions that the last step advanced; 0 when idle."""
        return 0 if self.idle else self._advanced

    @property
    def suspects(self) -> int:
        """Number of prompts of a failed pass that have not been tried alone yet."""
        return len(self._suspects)

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return not self._turns

    def handle(self, peer: Peer, message: ToSidecar) -> None:
        """Handle a message of a server."""
        match message:
            case Submit():
                self.submit(peer, message)
            case Admit():
                self.admit(peer, message)
            case Commits():
                self.follow(peer, message)
            case Close():
                self.close(peer, message)

    def submit(self, peer: Peer, message: Submit) -> None:
        """Begin to draft for a request, from the start if it was submitted before.

        A submission over a limit is declined.
        """
        subscriber = (peer, message.submission)
        self._leave(subscriber)
        objection = self._quota.objection(peer, message)
        if objection is not None:
            self._outbox.append((peer, objection))
            return
        limit = self._limit(message)
        key = prompt_key(message, limit, None if self._share else peer)
        prompt = self._turns.prompts.get(key)
        if prompt is None:
            eos = frozenset() if message.ignore_eos else self._model.eos_token_ids
            stops = eos.union(message.stop_token_ids)
            prompt = Prompt.submitted(key, message, stops, limit, peer)
            self._turns.add(prompt)
        place = (message.rank, next(self._arrivals))
        prompt.subscribe(subscriber, message.base_len, place, message.seeded)
        self._turns.arrange(prompt)
        self._wanted[subscriber] = prompt
        self._quota.open(peer, len(message.token_ids))
        for share in prompt.subscriptions[subscriber].shares:
            self._outbox += prompt.news_for(subscriber, share)

    def admit(self, peer: Peer, message: Admit) -> None:
        """Move a request that is now served behind the waiting requests."""
        subscriber = (peer, message.submission)
        prompt = self._wanted.get(subscriber)
        if prompt is not None:
            prompt.subscriptions[subscriber].place = None
            self._turns.arrange(prompt)

    def follow(self, peer: Peer, message: Commits) -> None:
        """Draft steps from committed output; answer a Gap for each unknown submission."""
        # Beginning a draft costs as much as its text is long: begin one per request.
        last = {commit.submission: commit for commit in message.requests}
        for commit in message.requests:
            subscriber = (peer, commit.submission)
            prompt = self._wanted.get(subscriber)
            if prompt is None:
                self._outbox.append((peer, Gap(commit.submission, None)))
            else:
                is_last = commit is last[commit.submission]
                self._follow(subscriber, prompt, commit, draft=is_last)

    def _follow(
        self, subscriber: Subscriber, prompt: Prompt, commit: Commit, *, draft: bool
    ) -> None:
        subscription = prompt.subscriptions[subscriber]
        before, peer = len(subscription.output_ids), subscriber[0]
        if commit.base_len <= subscription.known_len:
            end = commit.base_len - subscription.base_len + len(commit.token_ids)
            if not self._quota.fits_context(len(prompt.token_ids) + end):
                self._decline(subscriber, "the text has outgrown the draft model's context")
                return
            if not self._quota.has_room_for_text(peer, max(0, end - before)):
                reason = "the texts of its server have outgrown their share"
                self._decline(subscriber, reason, retry=True)
                return
        try:
            self._outbox += self._steps.follow(subscriber, prompt, commit, draft=draft)
        finally:
            after = len(subscription.output_ids)
            self._quota.add_text(peer, after - before)
        if subscription.place is not None:  # only a served request outruns its drafts
            return
        for share in subscription.shares:
            completion = share.completion
            overtaken = not completion.finished and len(completion.token_ids) < after
            if overtaken and completion.outran(share):
                self._finish(completion)

    def close(self, peer: Peer, message: Close) -> None:
        """Stop drafting for a request; unknown submissions are ignored."""
        self._leave((peer, message.submission))

    def drop(self, peer: Peer) -> None:
        """Stop drafting for all requests of a disconnected server."""
        for subscriber in [s for s in self._wanted if s[0] == peer]:
            self._leave(subscriber)
        self._turns.drop(peer)
        self._quota.drop(peer)

    def take(self) -> list[tuple[Peer, FromSidecar]]:
        """Return pending messages with their receivers, each once."""
        if self._undelivered and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_S
            undelivered, self._undelivered = self._undelivered, {}
            for share, subscriber in undelivered.items():
                completion = share.completion
                if completion.shares.get(subscriber) is share:
                    self._outbox += completion.prompt.news_for(subscriber, share)
        outbox, self._outbox = self._outbox, []
        return outbox

    def undelivered(self, peer: Peer, message: FromSidecar) -> None:
        """Queue the tokens of a message that the link did not take, to be sent again.

        Tokens of step drafts are not sent again, because the next Commit makes them obsolete.
        """
        if not isinstance(message, Drafted) or message.completion >= MAX_COMPLETIONS:
            return
        subscriber = (peer, message.submission)
        prompt = self._wanted.get(subscriber)
        if prompt is None:
            return
        for share in prompt.subscriptions[subscriber].shares:
            if share.number == message.completion:
                share.sent = min(share.sent, message.start)
                share.told_finished = False
                self._undelivered[share] = subscriber

    def step(self) -> None:
        """Run one pass: a token for the most urgent completions, and prefill of new prompts.

        If the pass raises, all KV that it may have touched is freed. Its prompts are then tried
        again one by one, and a prompt that fails alone is declined.

        Raises PromptError if a prompt fails alone while the model works for another text.
        """
        began, self._step_tokens, self._advanced = time.monotonic(), 0, 0
        self._computed.clear()
        suspect = self._next_suspect()
        plan = self._plan(suspect)
        if plan is None:
            return
        try:
            self._advance(plan)
        except Exception as error:
            self._recover(plan, suspect)
            if suspect is not None and self._works():
                raise PromptError(f"a pass over one text fails: {error}") from error
            raise
        if suspect is not None:
            self._acquit(suspect)
        seconds = time.monotonic() - began
        self._turns.charge(self._computed, seconds)
        if self._step_tokens:
            self.step_times.observe(self._advanced, self._step_tokens, self._read, seconds)

    def _next_suspect(self) -> Prompt | None:
        for prompt in list(self._suspects):
            if prompt in self._turns:
                return prompt
            del self._suspects[prompt]
        return None

    def _plan(self, suspect: Prompt | None) -> Plan | None:
        """Plan the next pass, and end completions that are too large for the KV."""
        while not self.idle and (suspect is None or suspect in self._turns):
            plan = self._scheduler.plan(suspect)
            if plan is not None:
                return plan
            self._finish(self._scheduler.first(suspect))
        return None

    def _advance(self, plan: Plan) -> None:
        self._advanced = len(plan)
        self._read = len(plan.decode) + min(plan.to_read, plan.most_read)
        if plan.prefill:
            self._prefill(plan.prefill, plan.most_read)
        if plan.decode:
            self._computed.update(completion.prompt.owner for completion in plan.decode)
            rows = [completion.row for completion in plan.decode if completion.row is not None]
            last = [completion.tail(len(completion) - 1, 1)[0] for completion in plan.decode]
            self._grow(plan.decode, self._model.step(rows, last))

    def _recover(self, plan: Plan, suspect: Prompt | None) -> None:
        """After a failed pass, free the rows of its prompts and mark the prompts as suspects.

        A suspect that failed alone is declined.
        """
        reach = {completion: len(completion) for completion in plan.completions}
        for prompt in {completion.prompt: None for completion in reach}:
            self._allocator.clear(prompt)
            self._suspects.setdefault(prompt, {})
        for completion, size in reach.items():
            self._suspects[completion.prompt][completion] = size
        if suspect is not None:
            del self._suspects[suspect]
            for subscriber in list(suspect.subscriptions):
                self._decline(subscriber, "a pass of the draft model over the text failed")

    def _acquit(self, suspect: Prompt) -> None:
        """Clear a suspect once passes over it alone have covered its part of the failed pass."""
        left = {
            completion: size
            for completion, size in self._suspects[suspect].items()
            if not completion.finished
            and completion.shares
            and (completion.row is None or self._model.length(completion.row) < size)
        }
        if left:
            self._suspects[suspect] = left
        else:
            del self._suspects[suspect]

    def _works(self) -> bool:
        """Whether the model can still run a pass, tested with a single token."""
        if not (self._model.free_rows and self._model.free_tokens):
            return False
        row = self._model.open()
        try:
            choose(self._model.extend([row], [[0]]), [GREEDY], [0], [0])
        except (DraftModelError, RuntimeError):  # torch raises RuntimeError
            return False
        finally:
            self._model.close(row)
        return True

    def expel(self, peer: Peer, message: ToSidecar) -> None:
        """Decline the requests of a message that could not be handled."""
        requests = message.requests if isinstance(message, Commits) else [message]
        for request in requests:
            if isinstance(request, Submit | Admit | Commit | Close):
                self._decline((peer, request.submission), "the sidecar failed to handle a message")

    def _decline(self, subscriber: Subscriber, reason: str, *, retry: bool = False) -> None:
        self._leave(subscriber)
        peer, submission = subscriber
        self._outbox.append((peer, Declined(submission, reason, retry)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, completions and rows are consistent."""
        self._turns.check_integrity()
        self._allocator.check_integrity()
        self._quota.check_integrity()
        prompts = self._turns.prompts.values()
        assert set(self._wanted.values()) == set(prompts)
        subscribers = [s for p in prompts for s in p.subscriptions]
        assert sorted(map(hash, subscribers)) == sorted(map(hash, self._wanted))
        for prompt in prompts:
            prompt.check_integrity()

    def _limit(self, message: Submit) -> int:
        """Maximum length of a completion, in tokens."""
        room = self._model.context_len - len(message.token_ids)
        return max(0, min(message.max_new_tokens, self._max_completion_tokens, room))

    def _leave(self, subscriber: Subscriber) -> None:
        prompt = self._wanted.pop(subscriber, None)
        if prompt is None:
            return
        subscription, dropped = prompt.unsubscribe(subscriber)
        self._steps.withdraw(subscription)
        text_tokens = len(prompt.token_ids) + len(subscription.output_ids)
        self._quota.close(subscriber[0], text_tokens)
        for completion in dropped:
            self._quota.add_drafts(prompt.owner, -len(completion.token_ids))
            self._allocator.drop(completion)
        if not prompt.subscriptions:
            self._allocator.clear(prompt)
            self._turns.remove(prompt)
            return
        for share in subscription.shares:
            completion = share.completion
            if completion.shares and not completion.useful_to and not completion.finished:
                self._finish(completion)
        prompt.serve_own()
        self._turns.arrange(prompt)

    def _prefill(self, completions: list[Completion], budget: int) -> None:
        """Prefill up to `budget` prompt tokens, the most urgent completions first.

        Each server with prompts to prefill gets an equal part of the budget. A completion with its
        prefill complete gets its next token.
        """
        owners = {completion.prompt.owner for completion in completions}
        left = dict.fromkeys(owners, max(1, budget // len(owners)))
        rows: list[int] = []
        parts: list[list[int]] = []
        complete: list[tuple[int, Completion]] = []
        for completion in completions:
            owner = completion.prompt.owner
            most = min(budget, left[owner])
            if completion.row is None or most == 0:
                continue
            part = completion.tail(self._model.length(completion.row), most)
            budget -= len(part)
            left[owner] -= len(part)
            self._computed[owner] += len(part)
            if len(part) == self._allocator.missing(completion):
                complete.append((len(rows), completion))
            rows.append(completion.row)
            parts.append(part)
        logits = self._model.extend(rows, parts)
        for place, completion in complete:
            self._grow([completion], logits[place : place + 1])

    def _grow(self, completions: list[Completion], logits: torch.Tensor) -> None:
        """Append a token to each completion, from the `logits` after its last token.

        `logits` is float [n, vocab].
        """
        for place, completion in enumerate(completions):
            if completion is completion.prompt.completions[0] and not completion.token_ids:
                self._branch(completion, logits[place : place + 1])
        self._append(completions, logits)

    def _branch(self, first: Completion, logits: torch.Tensor) -> None:
        """Begin the other completions of a prefilled prompt, from its last `logits` [1, vocab]."""
        others = [c for c in first.prompt.completions[1:] if not c.finished and not c.token_ids]
        if others and first.row is not None:
            self._allocator.keep(first.prompt, first)
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
            is_step = completion.kind is Kind.STEP
            self._step_tokens += is_step
            completion.token_ids.append(token)
            if place in chosen.candidates:
                completion.candidates.append(chosen.candidates[place])
            size = len(completion.token_ids)
            if not is_step:
                self._quota.add_drafts(prompt.owner, 1)
            full = not is_step and not self._quota.has_room_for_drafts(prompt.owner)
            if token in prompt.stops or size >= prompt.limit or full:
                self._finish(completion)
            elif size == 1 or size % FLUSH_TOKENS == 0 or is_step:
                self._outbox += prompt.news(completion)

    def _finish(self, completion: Completion) -> None:
        self._turns.finish(completion)
        self._allocator.release(completion)
        self._outbox += completion.prompt.news(completion)
