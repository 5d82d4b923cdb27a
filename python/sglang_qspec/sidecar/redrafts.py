"""Drafting anew for requests that are served and have left their drafts, or outrun them."""

from __future__ import annotations

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.messages import Commit
from sglang_qspec.sidecar.line import Line
from sglang_qspec.sidecar.prompt import Completion, Prompt, Subscriber, Subscription
from sglang_qspec.sidecar.rows import Rows
from sglang_qspec.sidecar.sampling import GREEDY
from sglang_qspec.sidecar.tenancy import Tenancy

REDRAFT_TOKENS = 128
"""Longest redraft: most requests leave it earlier, and one that outruns it gets another."""


class Redrafts:
    """Keeps for each such request one greedy continuation of what its target has committed.

    It is a prompt of its own, the request's prompt with its output, whose KV comes from rows that
    hold most of it.
    """

    def __init__(
        self, model: Rows, line: Line, tenancy: Tenancy, max_completion_tokens: int
    ) -> None:
        self._model = model
        self._line = line
        self._tenancy = tenancy
        self._max_tokens = min(REDRAFT_TOKENS, max_completion_tokens)

    def follow(self, subscriber: Subscriber, prompt: Prompt, commit: Commit) -> None:
        """The target has committed more for one of the prompt's requests.

        Nothing is begun while a draft runs ahead of it in agreement, or when a part of its output
        is not known.
        """
        subscription = prompt.subscriptions[subscriber]
        if commit.base_len != subscription.base_len + len(subscription.output_ids):
            return
        subscription.output_ids += commit.token_ids
        drafts = [*prompt.completions]
        if subscription.redraft is not None:
            drafts += subscription.redraft.completions
        if not any(_runs_ahead(draft, prompt, subscription.output_ids) for draft in drafts):
            self._begin(subscriber, prompt, commit)

    def withdraw(self, subscription: Subscription) -> None:
        """The request has gone, or is to be drafted for from another place."""
        redraft, subscription.redraft = subscription.redraft, None
        if redraft is not None:
            self._tenancy.clear(redraft)
            self._line.withdraw(redraft)

    def _begin(self, subscriber: Subscriber, prompt: Prompt, commit: Commit) -> None:
        subscription = prompt.subscriptions[subscriber]
        token_ids = prompt.token_ids + subscription.output_ids
        redraft = Prompt(
            (subscriber, subscription.redrafts),
            token_ids,
            prompt.stops,
            self._limit(len(token_ids), commit.max_new_tokens),
            [GREEDY],
            parent=prompt,
            number=MAX_COMPLETIONS + subscription.redrafts,
        )
        redraft.subscribe(subscriber, subscription.base_len + len(subscription.output_ids), None)
        if subscription.redraft is not None:
            self._tenancy.hand_over(subscription.redraft, redraft)
        self.withdraw(subscription)
        subscription.redraft = redraft
        subscription.redrafts += 1
        self._line.begin(redraft)

    def _limit(self, size: int, max_new_tokens: int) -> int:
        if size >= self._model.total_tokens:
            return 0
        return max(0, min(max_new_tokens, self._max_tokens, self._model.context_len - size))


def _runs_ahead(draft: Completion, prompt: Prompt, output_ids: list[int]) -> bool:
    """Whether a draft for a request of `prompt` begins with its output, and goes on."""
    rest = output_ids[len(draft.prompt.token_ids) - len(prompt.token_ids) :]
    return len(draft.token_ids) > len(rest) and draft.token_ids[: len(rest)] == rest
