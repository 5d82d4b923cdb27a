"""A simulated request: its output so far, and the draft that continues it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.policy import Credit
from sglang_qspec.tools.measure.tables import Agreement
from sglang_qspec.tools.plan.trace import Arrival


class SimulatedRequest:
    """One request. Positions count output tokens from 0.

    A draft begins at a position and has the draft model's tokens up to its end. Its tokens are the
    target's up to the first position at which the models disagree. So the positions of a draft say
    everything about it, and the outcome of each pass is known.
    """

    def __init__(self, arrival: Arrival, agreed: NDArray[np.bool_], rid: str = "") -> None:
        """`agreed` says for each output token whether the draft model chooses it too.

        `rid` names the request; a target serves no two requests of one name.
        """
        self.arrival = arrival
        self.rid = rid
        self.size = size = len(agreed)
        """Output tokens of the whole answer."""
        wrong = np.where(agreed, size, np.arange(size))
        nearest = np.minimum.accumulate(wrong[::-1])[::-1]
        self.next_wrong: list[int] = [*nearest.tolist(), size]
        """By position, the first position from there on at which the models disagree."""
        self.credit = Credit()
        self.done = 0
        """Output tokens so far."""
        self.accepted = 0
        """Those of them that were drafts."""
        self.admitted: float | None = None
        """Start of the prefill; None before it."""
        self.first: float | None = None
        """Time of the first output token; None before it."""
        self.finished: float | None = None
        """Time of the last output token; None before it."""
        self.known = 0
        """Output tokens that the sidecar knows."""
        self.unread = arrival.prompt
        """Tokens that the sidecar has not read."""
        self.begin = self.end = 0
        """The draft at the sidecar."""
        self.seen_begin = self.seen_end = 0
        """The draft as far as it has arrived at the target."""

    @property
    def available(self) -> int:
        """Draft tokens at the target that continue the output."""
        if self.next_wrong[self.seen_begin] < self.done:
            return 0
        return max(0, self.seen_end - self.done)

    @property
    def follows(self) -> bool:
        """Whether the output that the sidecar knows agrees with the draft at the sidecar."""
        return self.next_wrong[self.begin] >= self.known and self.end >= self.known

    def right(self, drafts: int) -> int:
        """How many of the next `drafts` draft tokens the target accepts."""
        return min(drafts, self.next_wrong[self.done] - self.done)


def agreed_tokens(agreement: Agreement, size: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Whether the models agree on each of `size` tokens.

    A probability gives independent draws. Measured answers are joined in a random order.
    """
    if isinstance(agreement, float | int):
        drawn: NDArray[np.bool_] = rng.random(size) < agreement
        return drawn
    text = ""
    while len(text) < size:
        text += agreement[int(rng.integers(len(agreement)))]
    return np.frombuffer(text[:size].encode(), dtype=np.uint8) == ord("1")
