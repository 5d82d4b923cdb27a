"""A draft model for waiting requests, and a head for those that the target serves.

Both have each submission. The draft model completes the prompts and only follows the committed
output; the head drafts behind it. The head's short passes come first. If one of the two declines a
submission, the other one leaves it too.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_qspec.link import Peer
from sglang_qspec.messages import (
    Admit,
    Close,
    Commits,
    Declined,
    FromSidecar,
    Gap,
    States,
    Submit,
    ToSidecar,
)
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.sidecar.head_drafter import HeadDrafter


class PairDrafter:
    """Gives the messages of servers to two drafters, which share their statistics."""

    def __init__(self, drafts: Drafter, head: HeadDrafter) -> None:
        """`drafts` makes no step drafts."""
        self._drafts, self._head = drafts, head
        self.statistics = drafts.statistics
        self.overload = drafts.overload
        self.retries = drafts.retries

    def warm_up(self) -> None:
        """Run first passes; the times of draft steps are those of the head."""
        self._head.warm_up()
        self._drafts.warm_up()

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do."""
        return self._drafts.idle and self._head.idle

    @property
    def requests(self) -> int:
        """Number of requests with an unfinished draft, those with two counted twice."""
        return self._drafts.requests + self._head.requests

    @property
    def texts(self) -> int:
        """Number of distinct prompts of the draft model."""
        return self._drafts.texts

    @property
    def advanced(self) -> int:
        """Number of completions and texts that the last passes advanced; 0 when idle."""
        return self._drafts.advanced + self._head.advanced

    @property
    def declined(self) -> int:
        """Number of declines since the start."""
        return self._drafts.declined + self._head.declined

    def handle(self, peer: Peer, message: ToSidecar) -> None:
        """Handle a message of a server."""
        match message:
            case Submit() | Commits() | Close():
                self._head.handle(peer, message)
                self._drafts.handle(peer, message)
            case States():
                self._head.handle(peer, message)
            case Admit():
                self._drafts.handle(peer, message)

    def expel(self, peer: Peer, message: ToSidecar) -> None:
        """Decline the requests of a message that could not be handled."""
        self._head.expel(peer, message)  # `take` lets the other one leave them

    def drop(self, peer: Peer) -> None:
        """Forget all requests of a server that has gone."""
        self._head.drop(peer)
        self._drafts.drop(peer)

    def take(self) -> list[tuple[Peer, FromSidecar]]:
        """Return pending messages with their receivers, each once."""
        of_head = self._head.take()
        # Both lack the same output, and the head has said so.
        of_model = [each for each in self._drafts.take() if not isinstance(each[1], Gap)]
        for messages, other in ((of_head, self._drafts), (of_model, self._head)):
            for peer, message in messages:
                if isinstance(message, Declined):
                    other.handle(peer, Close(message.submission))
        return of_head + of_model

    def undelivered(self, peer: Peer, message: FromSidecar) -> None:
        """Queue the tokens of a completion that the link did not take, to be sent again."""
        self._drafts.undelivered(peer, message)

    def step(self, ends: Callable[[], bool] = lambda: False) -> None:
        """Run the head's passes if it has work, otherwise those of the draft model."""
        (self._drafts if self._head.idle else self._head).step(ends)

    def check_integrity(self) -> None:
        """Raise AssertionError unless both are consistent."""
        self._head.check_integrity()
        self._drafts.check_integrity()
