"""Drafting for requests that are served, from what their targets have committed."""

from __future__ import annotations

from array import array

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import Commit, Drafted, Gap
from sglang_qspec.sidecar.draft_kv import DraftKV
from sglang_qspec.sidecar.prompt import Completion, Prompt, Subscriber, Subscription, tokens_of
from sglang_qspec.sidecar.row_allocator import RowAllocator
from sglang_qspec.sidecar.sampling import GREEDY
from sglang_qspec.sidecar.turns import Turns


class StepDrafter:
    """Keeps for each such request one draft that runs ahead of it as far as it is told to.

    A step draft is a prompt of its own, the request's prompt with its output, whose KV comes from
    rows that hold most of it. One that has run ahead far enough rests, and goes on when the target
    has followed; one that the target leaves or outruns ends for another. It is greedy where the
    target is, and otherwise drawn with the target's own dice, or sent with what it was drawn from.
    """

    def __init__(self, model: DraftKV, turns: Turns, allocator: RowAllocator) -> None:
        self._model = model
        self._turns = turns
        self._allocator = allocator

    def follow(
        self, subscriber: Subscriber, prompt: Prompt, commit: Commit, *, draft: bool = True
    ) -> list[tuple[Peer, Drafted | Gap]]:
        """The target has committed more for one of the prompt's requests.

        Without `draft` another commit of the request follows at once, and only that is drafted on
        from. Returns what is to be sent at once: where nothing more is to come before the next
        commit, that the server need not wait; where tokens are missing, what is known.
        """
        peer, submission = subscriber
        subscription = prompt.subscriptions[subscriber]
        known_len = subscription.known_len
        if commit.base_len > known_len:
            return [(peer, Gap(submission, known_len))]
        fresh = commit.token_ids[known_len - commit.base_len :]
        if not fresh:  # sent twice, after a gap
            return []
        subscription.output_ids += tokens_of(fresh)
        if not draft:
            return []
        self._go_on(subscriber, prompt, commit.max_new_tokens)
        if prompt.stepping(subscriber):
            return []
        known_len = subscription.known_len
        rest = Drafted(
            submission, MAX_COMPLETIONS, known_len, 0, [], finished=True, known_len=known_len
        )
        return [(peer, rest)]

    def _go_on(self, subscriber: Subscriber, prompt: Prompt, lookahead: int) -> None:
        """Extend the request's draft to `lookahead` tokens, or begin another.

        Nothing is begun while a queue draft runs ahead as far in agreement, other than by chance.
        """
        subscription = prompt.subscriptions[subscriber]
        size = len(prompt.token_ids) + len(subscription.output_ids)
        wanted = self._wanted(size, lookahead)
        step = subscription.step_draft
        if step is not None:
            ahead = _ahead(step.completions[0], prompt, subscription.output_ids)
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
        """End the request's step draft and give back its KV."""
        step, subscription.step_draft = subscription.step_draft, None
        if step is not None:
            self._allocator.clear(step)
            self._turns.withdraw(step)
            self._turns.live_steps[step.owner] -= 1

    def _extend(self, step: Prompt, missing: int) -> None:
        """Let the draft have `missing` tokens more than it has, if it may go on at all."""
        (completion,) = step.completions
        if missing <= 0 or (completion.token_ids and completion.token_ids[-1] in step.stops):
            return
        step.limit = len(completion.token_ids) + missing
        if completion.finished:
            completion.finished = False
            self._allocator.take_back(step)
            self._turns.begin(step)

    def _begin(self, subscriber: Subscriber, prompt: Prompt, wanted: int) -> None:
        subscription = prompt.subscriptions[subscriber]
        step = Prompt(
            (subscriber, subscription.step_drafts),
            prompt.token_ids + subscription.output_ids,
            prompt.stops,
            wanted,
            [subscription.seeded or GREEDY],
            owner=subscriber[0],
            parent=prompt,
            number=MAX_COMPLETIONS + subscription.step_drafts,
        )
        step.subscribe(subscriber, subscription.known_len, None, subscription.seeded)
        if subscription.step_draft is not None:
            self._allocator.hand_over(subscription.step_draft, step)
        self.withdraw(subscription)
        subscription.step_draft = step
        subscription.step_drafts += 1
        self._turns.live_steps[step.owner] += 1
        self._turns.begin(step)

    def _wanted(self, size: int, max_new_tokens: int) -> int:
        """Tokens to draft behind a text of so many."""
        if size >= self._model.total_tokens:
            return 0
        return max(0, min(max_new_tokens, self._model.context_len - size))


def _ahead(draft: Completion, prompt: Prompt, output_ids: array[int]) -> int | None:
    """How many tokens a draft for a request of `prompt` runs ahead of its output.

    None if the target has left it or outrun it.
    """
    rest = output_ids[len(draft.prompt.token_ids) - len(prompt.token_ids) :]
    if draft.token_ids[: len(rest)] != rest:
        return None
    return len(draft.token_ids) - len(rest)
