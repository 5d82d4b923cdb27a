"""Drafts steps: tokens that continue the committed output of served requests."""

from __future__ import annotations

from array import array

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import Commit, Drafted, Gap
from sglang_qspec.sidecar.fair_queue import FairQueue
from sglang_qspec.sidecar.judging import judge
from sglang_qspec.sidecar.kv_rows import KVRows
from sglang_qspec.sidecar.prompt import Prompt
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.subscription import StepDraft, Subscription
from sglang_qspec.sidecar.text import Completion, Subscriber, tokens_of


class StepDrafter:
    """Keeps one step draft per served request, up to a lookahead beyond its committed output.

    A `StepDraft` reuses the KV of rows that hold most of its text. At the lookahead it pauses until
    the target commits more. When the target diverges from a draft or outruns it, a new draft
    replaces it.

    Step drafts of greedy requests are greedy. Step drafts of sampled requests use the target's
    sampling seed, or are sent with their `Candidates`.
    """

    def __init__(self, rows: KVRows, queue: FairQueue, allocator: RowAllocator) -> None:
        self._rows = rows
        self._queue = queue
        self._allocator = allocator

    def follow(
        self, subscriber: Subscriber, prompt: Prompt, commit: Commit, *, draft: bool = True
    ) -> list[tuple[Peer, Drafted | Gap]]:
        """Apply a commit of one of the prompt's requests, and draft from there.

        Without `draft` the commit is only applied, because another commit of the request follows.
        Returns messages to send at once. A finished, empty Drafted says that nothing is drafted
        until the next commit, so that the server does not wait. A Gap says that earlier output is
        missing.
        """
        peer, submission = subscriber
        subscription = prompt.subscriptions[subscriber]
        known_len = subscription.known_len
        if commit.base_len > known_len:
            return [(peer, Gap(submission, known_len))]
        fresh = commit.token_ids[known_len - commit.base_len :]
        if not fresh:  # repeated after a Gap
            return []
        before = len(subscription.output_ids)
        subscription.output_ids += tokens_of(fresh)
        judge(self._queue.worth_to(prompt.owner), prompt, subscription, before)
        if not draft:
            return []
        self._go_on(subscriber, prompt, commit.max_new_tokens)
        if subscription.stepping:
            return []
        known_len = subscription.known_len
        rest = Drafted(
            submission, MAX_COMPLETIONS, known_len, 0, [], finished=True, known_len=known_len
        )
        return [(peer, rest)]

    def _go_on(self, subscriber: Subscriber, prompt: Prompt, lookahead: int) -> None:
        """Extend the request's step draft to `lookahead` tokens, or begin a new one.

        It begins none while a queue draft with the request's own sampling agrees with the output
        and reaches `lookahead` tokens ahead.
        """
        subscription = prompt.subscriptions[subscriber]
        size = len(prompt.token_ids) + len(subscription.output_ids)
        wanted = self._wanted(size, lookahead)
        step = subscription.step_draft
        if step is not None:
            ahead = _ahead(step.completion, prompt, subscription.output_ids)
            if ahead is not None:
                self._extend(step, wanted - ahead)
                return
        for completion in (share.completion for share in subscription.shares):
            if completion.sampling != subscription.seeded and subscription.seeded is not None:
                continue
            ahead = _ahead(completion, prompt, subscription.output_ids)
            if ahead and (ahead >= wanted or completion.token_ids[-1] in prompt.stops):
                self.withdraw(subscription)
                return
        self._begin(subscriber, prompt, wanted)

    def withdraw(self, subscription: Subscription) -> None:
        """End the request's step draft and free its KV."""
        step, subscription.step_draft = subscription.step_draft, None
        if step is not None:
            self._allocator.clear(step)
            self._queue.withdraw(step)
            self._queue.live_steps[step.owner] -= 1

    def _extend(self, step: StepDraft, missing: int) -> None:
        """Let the draft grow by `missing` tokens, unless it ends in a stop token."""
        completion = step.completion
        if missing <= 0 or (completion.token_ids and completion.token_ids[-1] in step.stops):
            return
        step.limit = len(completion.token_ids) + missing
        if completion.finished:
            completion.finished = False
            self._allocator.take_back(step)
            self._queue.begin(step)

    def _begin(self, subscriber: Subscriber, prompt: Prompt, wanted: int) -> None:
        subscription = prompt.subscriptions[subscriber]
        step = StepDraft(prompt, subscriber, subscription, wanted)
        if subscription.step_draft is not None:
            self._allocator.hand_over(subscription.step_draft, step)
        self.withdraw(subscription)
        subscription.step_draft = step
        self._queue.live_steps[step.owner] += 1
        self._queue.begin(step)

    def _wanted(self, size: int, max_new_tokens: int) -> int:
        """Number of tokens to draft after a text of `size` tokens."""
        if size >= self._rows.total_slots:
            return 0
        return max(0, min(max_new_tokens, self._rows.context_len - size))


def _ahead(draft: Completion, prompt: Prompt, output_ids: array[int]) -> int | None:
    """Number of draft tokens beyond the request's output.

    None if the target has diverged from the draft or outrun it.
    """
    rest = output_ids[len(draft.text.token_ids) - len(prompt.token_ids) :]
    if draft.token_ids[: len(rest)] != rest:
        return None
    return len(draft.token_ids) - len(rest)
