"""The state of one live request at the sidecar, as the sidecar's messages report it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_qspec.policy import Route


@dataclass
class Drafting:
    """State of a request at its sidecar. The clients in `engine.sidecar` alone change it."""

    submission: int | None = None
    """Number of the open submission; None while there is none."""
    repairs: int = 0
    """Number of times that this sidecar has asked for missing tokens of the request."""
    declined: bool = False
    """Whether the present sidecar has refused to draft for the request."""
    unfinished: set[int] = field(default_factory=set)
    """Numbers of the completions of the open submission that the sidecar has not finished."""
    has_steps: bool = False
    """A step draft has come since the submission was sent: the sidecar has read the prompt."""
    complete_at: int | None = None
    """Committed output length, in tokens, at which the sidecar finished its step draft. The draft
    does not grow before the target commits more."""
    route: Route | None = None
    """Digests of prompt and scope; None while a server with one sidecar needs none."""

    def end_submission(self) -> None:
        """Forget the open submission."""
        self.submission = None
        self.unfinished.clear()
        self.has_steps = False
        self.complete_at = None
