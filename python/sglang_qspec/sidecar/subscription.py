"""Owns the state of one request: its place in the queue, committed output and drafts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.messages import SeededSampling
from sglang_qspec.sidecar.sampling import GREEDY
from sglang_qspec.sidecar.text import Place, Share, Subscriber, Text


@dataclass(eq=False, slots=True)
class Subscription:
    """State of one request: the completions that it receives, and its committed output."""

    base_len: int
    """Length of the committed output at its Submit, in tokens."""
    place: Place | None
    """Place in the server's queue; None once the request is served."""
    seeded: SeededSampling | None = None
    """Sampling seed and filters of the step drafts; None for greedy step drafts."""
    shares: list[Share] = field(default_factory=list)
    """Deliveries of the completions that the request receives."""
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    """Output committed after `base_len`, as reported by the server."""
    step_draft: StepDraft | None = None
    """Current step draft; None without one."""
    step_drafts: int = 0
    """Number of step drafts begun so far."""

    @property
    def known_len(self) -> int:
        """Length of the committed output that the server reported, in tokens."""
        return self.base_len + len(self.output_ids)

    @property
    def stepping(self) -> bool:
        """Whether the request has an unfinished step draft."""
        return self.step_draft is not None and not self.step_draft.finished

    @property
    def busy(self) -> bool:
        """Whether the request has an unfinished completion or step draft."""
        return self.stepping or any(not share.completion.finished for share in self.shares)


class StepDraft(Text):
    """The prompt with the output committed at the draft's start, and the one completion of it."""

    def __init__(
        self, prompt: Text, subscriber: Subscriber, subscription: Subscription, limit: int
    ) -> None:
        """Begin the request's next step draft, of at most `limit` tokens."""
        super().__init__(
            prompt.token_ids + subscription.output_ids,
            prompt.stops,
            limit,
            owner=subscriber[0],
            scope=prompt.scope,
            parent=prompt,
        )
        self._subscription = subscription
        self.completion = self.begin(subscription.seeded or GREEDY)
        number = MAX_COMPLETIONS + subscription.step_drafts
        self.completion.give_to(subscriber, number, subscription.known_len)
        subscription.step_drafts += 1

    @property
    def committed(self) -> int:
        assert self.parent is not None
        return len(self.parent.token_ids) + len(self._subscription.output_ids)

    @property
    def known_len(self) -> int:
        return self._subscription.known_len
