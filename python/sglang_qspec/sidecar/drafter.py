"""Owns the open submissions of all servers, and drafts for them in batches.

Each step decodes one token, or a burst of tokens, for the first `slots` unfinished completions in
the order of `FairQueue`. A new completion can displace a less urgent one, which pauses, keeps its
KV row, and continues later.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from sglang_qspec.config import MAX_BACKLOG_S, MAX_COMPLETIONS, MAX_SERVER_TOKENS
from sglang_qspec.errors import PromptError
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
    submissions_of,
)
from sglang_qspec.sidecar.batch_scheduler import BatchScheduler
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.guesser import Guesser
from sglang_qspec.sidecar.outbox import Outbox
from sglang_qspec.sidecar.overload import Overload
from sglang_qspec.sidecar.pass_runner import PassRunner
from sglang_qspec.sidecar.prompt import Prompt, prompt_key
from sglang_qspec.sidecar.quota import Quota
from sglang_qspec.sidecar.retries import Retries
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.step_drafter import StepDrafter
from sglang_qspec.sidecar.text import Subscriber
from sglang_qspec.sidecar.warm_up import read_seconds, step_seconds

MOST_LEFT_OUT = 1024
"""Maximum number of completions that one step examines and may skip in overload."""


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
        steps: bool = True,
        max_server_tokens: int = MAX_SERVER_TOKENS,
        max_backlog_s: float = MAX_BACKLOG_S,
        most_passes: int = 1,
        most_bursts: int = 1,
        guesser: Guesser | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the limits of a pass, and choose what passes and servers share.

        `slots` is the maximum number of completions in one pass, and `prefill_tokens` the maximum
        number of prompt tokens. With `apart`, step drafts, first completions, other completions and
        servers do not share passes, because a larger pass is slower on a CPU. With `share`, equal
        prompts of several servers are drafted once and share their KV. Without `steps` committed
        output is followed, but no step drafts continue it. `max_server_tokens` limits
        the text tokens, and separately the draft tokens, kept for one server. If one of several
        servers has a backlog of more than `max_backlog_s` seconds, the drafter may skip work
        (`Overload`). `most_passes` is the maximum number of decode passes in a burst, and
        `most_bursts` that of bursts in a step. Single passes verify guesses of the `guesser`.
        """
        self._model = model
        self._rows = model.rows
        self._slots = slots
        self._max_completion_tokens = max_completion_tokens
        self._share = share
        self._drafts_steps = steps
        self._quota = Quota(min(self._rows.context_len, self._rows.total_slots), max_server_tokens)
        self.queue = FairQueue(apart=apart)
        """The subscribed prompts, and the order of their completions."""
        self._allocator = RowAllocator(self._rows, self.queue, share=share)
        scheduler = BatchScheduler(
            self._rows,
            self.queue,
            self._allocator,
            slots=slots,
            prefill_tokens=prefill_tokens,
            apart=apart,
        )
        self._steps = StepDrafter(self._rows, self.queue, self._allocator)
        self._arrivals = itertools.count()
        self._wanted: dict[Subscriber, Prompt] = {}
        """Prompt of each open submission."""
        self._outbox = Outbox()
        self._passes = PassRunner(
            model,
            self.queue,
            self._allocator,
            scheduler,
            self._quota,
            self._outbox,
            most_passes=most_passes,
            most_bursts=most_bursts,
            guesser=guesser,
        )
        self._guesser = guesser
        self.statistics = self._passes.statistics
        self.retries = Retries(self._rows, self.queue, self._allocator)
        """The prompts of failed passes."""
        self.overload = Overload(self.queue, self.statistics, max_backlog_s, clock)
        self.declined = 0
        """Number of submissions declined since the start."""

    def warm_up(self) -> None:
        """Run first passes, and take their times as those of draft steps and of reading."""
        times = step_seconds(self._model, self._slots)
        self.statistics.expect_steps(times)
        if self._guesser is not None:
            self._guesser.choice.expect(times)
        self.statistics.expect_reading(read_seconds(self._model))

    @property
    def requests(self) -> int:
        """Number of requests with unfinished completions or step drafts."""
        return sum(prompt.subscriptions[s].busy for s, prompt in self._wanted.items())

    @property
    def texts(self) -> int:
        """Number of distinct prompts that are kept."""
        return len(self.queue.prompts)

    @property
    def advanced(self) -> int:
        """Number of completions that the last step advanced; 0 when idle."""
        return 0 if self.idle else self._passes.advanced

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return not self.queue

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
        limit = self._limit(message)
        # Servers that share completions must have the same ids, which the completions consist of.
        vocab_size = min(peer.vocab_size, self._model.vocab_size)
        # Numbers of scopes mean something only to the server that assigned them.
        shares = self._share and not message.scope
        key = prompt_key(message, limit, vocab_size if shares else peer)
        prompt = self.queue.prompts.get(key)
        place = (message.rank, next(self._arrivals))
        objection = self._quota.objection(peer, message)
        if objection is None and prompt is None:
            objection = self.overload.objection(peer, message, place)
        if objection is not None:
            self.declined += 1
            self._outbox.add(peer, objection)
            return
        if prompt is None:
            eos = frozenset() if message.ignore_eos else self._model.eos_token_ids
            stops = eos.union(message.stop_token_ids)
            prompt = Prompt.submitted(key, message, stops, limit, peer)
            self.queue.add(prompt)
        prompt.subscribe(subscriber, message.base_len, place, message.seeded)
        self.queue.arrange(prompt)
        self._wanted[subscriber] = prompt
        self._quota.open(peer, len(message.token_ids))
        self.overload.enter(peer)
        for share in prompt.subscriptions[subscriber].shares:
            self._outbox.extend(share.news())

    def admit(self, peer: Peer, message: Admit) -> None:
        """Move a request behind the waiting requests, because the target has begun to serve it."""
        subscriber = (peer, message.submission)
        prompt = self._wanted.get(subscriber)
        if prompt is not None:
            subscription = prompt.subscriptions[subscriber]
            if subscription.place is not None:
                self.overload.leave(peer)
            subscription.place = None
            self.queue.arrange(prompt)

    def follow(self, peer: Peer, message: Commits) -> None:
        """Draft steps from committed output; answer a Gap for each unknown submission."""
        # Beginning a draft may prefill the whole text, so begin only one per request.
        last = {commit.submission: commit for commit in message.requests}
        for commit in message.requests:
            subscriber = (peer, commit.submission)
            prompt = self._wanted.get(subscriber)
            if prompt is None:
                self._outbox.add(peer, Gap(commit.submission, None))
            else:
                draft = self._drafts_steps and commit is last[commit.submission]
                self._follow(subscriber, prompt, commit, draft=draft)

    def _follow(
        self, subscriber: Subscriber, prompt: Prompt, commit: Commit, *, draft: bool
    ) -> None:
        subscription = prompt.subscriptions[subscriber]
        before, peer = len(subscription.output_ids), subscriber[0]
        if commit.base_len <= subscription.known_len:
            end = commit.base_len - subscription.base_len + len(commit.token_ids)
            if not self._quota.fits_context(len(prompt.token_ids) + end):
                self._decline(subscriber, "the text no longer fits the draft model's context")
                return
            if not self._quota.has_room_for_text(peer, max(0, end - before)):
                reason = "the texts of this server exceed its limit of tokens"
                self._decline(subscriber, reason, retry=True)
                return
        try:
            self._outbox.extend(self._steps.follow(subscriber, prompt, commit, draft=draft))
        finally:
            after = len(subscription.output_ids)
            self._quota.add_text(peer, after - before)
        if subscription.place is not None:
            return  # only the output of a served request grows past its drafts
        for share in subscription.shares:
            completion = share.completion
            overtaken = not completion.finished and len(completion.token_ids) < after
            if overtaken and share.fall_behind():
                self._passes.finish(completion)

    def close(self, peer: Peer, message: Close) -> None:
        """Stop drafting for a request; unknown submissions are ignored."""
        self._leave((peer, message.submission))

    def drop(self, peer: Peer) -> None:
        """Stop drafting for all requests of a disconnected server."""
        for subscriber in [s for s in self._wanted if s[0] == peer]:
            self._leave(subscriber)
        self.queue.drop(peer)
        self._quota.drop(peer)
        self.overload.drop(peer)

    def take(self) -> list[tuple[Peer, FromSidecar]]:
        """Return pending messages with their receivers, each once."""
        return self._outbox.take()

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
                self._outbox.repeat(share, message.start)

    def step(self, ends: Callable[[], bool] = lambda: False) -> None:
        """Run one pass: a token for the most urgent completions, and prefill of new prompts.

        Without prefill it may be bursts of decode passes, which stop when it `ends`.

        If the pass raises, all KV that it may have touched is freed. Its prompts are then tried
        again one by one, and a prompt that fails alone is declined.

        Raises PromptError if a prompt fails alone while the model works for another text.
        """
        self._passes.begin()
        self._leave_out()
        retried = self.retries.next()
        # In overload `_leave_out` follows the order of urgency.
        batch = self._passes.plan(retried, by_worth=not self.overload.level)
        if batch is None:
            return
        try:
            self._passes.run(batch, ends)
        except Exception as error:
            self.retries.add(batch)
            if retried is not None:
                self.retries.remove(retried)
                for subscriber in list(retried.subscribers):
                    self._decline(subscriber, "a pass of the draft model over the text failed")
                if self._passes.works():
                    raise PromptError(f"a pass over one text fails: {error}") from error
            raise
        if retried is not None:
            self.retries.settle(retried)
        self._passes.charge()

    def _leave_out(self) -> None:
        """In overload, end the completions next in turn that `Overload` skips."""
        if not self.overload.level:
            return
        kept, ended = 0, []
        for completion in itertools.islice(self.queue.urgent(), MOST_LEFT_OUT):
            if self.overload.leaves_out(completion):
                ended.append(completion)
            else:
                kept += 1
                if kept == self._slots:
                    break
        self.overload.left_out += len(ended)
        for completion in ended:
            self._passes.finish(completion)

    def expel(self, peer: Peer, message: ToSidecar) -> None:
        """Decline the requests of a message that could not be handled."""
        for submission in submissions_of(message):
            self._decline((peer, submission), "the sidecar failed to handle a message")

    def _decline(self, subscriber: Subscriber, reason: str, *, retry: bool = False) -> None:
        self._leave(subscriber)
        self.declined += 1
        peer, submission = subscriber
        self._outbox.add(peer, Declined(submission, reason, retry))

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, completions and rows are consistent."""
        self.queue.check_integrity()
        self._allocator.check_integrity()
        self._quota.check_integrity()
        self.overload.check_integrity()
        prompts = self.queue.prompts.values()
        assert set(self._wanted.values()) == set(prompts)
        subscribers = [s for p in prompts for s in p.subscriptions]
        assert sorted(map(hash, subscribers)) == sorted(map(hash, self._wanted))
        for prompt in prompts:
            prompt.check_integrity()

    def _limit(self, message: Submit) -> int:
        """Maximum length of a completion, in tokens."""
        room = self._rows.context_len - len(message.token_ids)
        return max(0, min(message.max_new_tokens, self._max_completion_tokens, room))

    def _leave(self, subscriber: Subscriber) -> None:
        prompt = self._wanted.pop(subscriber, None)
        if prompt is None:
            return
        subscription, dropped = prompt.unsubscribe(subscriber)
        if subscription.place is not None:
            self.overload.leave(subscriber[0])
        self._steps.withdraw(subscription)
        text_tokens = len(prompt.token_ids) + len(subscription.output_ids)
        self._quota.close(subscriber[0], text_tokens)
        for completion in dropped:
            self._quota.add_drafts(prompt.owner, -len(completion.token_ids))
            self._allocator.drop(completion)
        if not prompt.subscriptions:
            self._allocator.clear(prompt)
            self.queue.remove(prompt)
            return
        for share in subscription.shares:
            completion = share.completion
            if completion.shares and not completion.useful_to and not completion.finished:
                self._passes.finish(completion)
        prompt.serve_own()
        self.queue.arrange(prompt)
