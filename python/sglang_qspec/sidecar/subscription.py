"""Owns the state of one request: its place in the queue, committed output and deliveries."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_qspec.link import Peer
from sglang_qspec.messages import SeededSampling

if TYPE_CHECKING:
    from sglang_qspec.sidecar.completion import Completion
    from sglang_qspec.sidecar.prompt import Prompt

Subscriber = tuple[Peer, int]
"""A server, and the number of one of its submissions: identifies a request."""
Place = tuple[tuple[int, int], int]
"""Place of a request in its server's queue: rank, then order of arrival at the sidecar. The server
serves the smallest place first."""


@dataclass(eq=False, slots=True)
class Share:
    """Delivery of one completion to one request."""

    completion: Completion
    number: int
    """Number of the completion in messages to this request; 0 is the greedy one, or the one drawn
    with the request's own seed."""
    sent: int = 0
    """Number of tokens sent."""
    finished_sent: bool = False
    """Whether a message with `finished` was sent."""
    outrun: bool = False
    """Whether the request's committed output was longer than the unfinished completion."""


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
    step_draft: Prompt | None = None
    """Current step draft: the prompt with the output committed at its start; None without one."""
    step_drafts: int = 0
    """Number of step drafts begun so far."""

    @property
    def known_len(self) -> int:
        """Length of the committed output that the server reported, in tokens."""
        return self.base_len + len(self.output_ids)

    @property
    def busy(self) -> bool:
        """Whether the request has an unfinished completion or step draft."""
        step = self.step_draft
        unfinished = any(not share.completion.finished for share in self.shares)
        return unfinished or (step is not None and not step.finished)
