"""The state of one live request at the sidecar, as the sidecar's messages report it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_qspec.policy import Route


@dataclass
class Submission:
    """An open submission: what the sidecar has and has sent since the Submit."""

    number: int
    kept_tokens: int
    """Number of tokens that the sidecar keeps, at most: the Submit's, and all reported ones."""
    reported: int
    """Number of output tokens that the Submit and the reports had."""
    unfinished: set[int]
    """Numbers of the completions that the sidecar has not finished."""
    has_steps: bool = False
    """A step draft has come since the submission was sent: the sidecar has read the prompt."""
    complete_at: int | None = None
    """Committed output length, in tokens, at which the sidecar finished its step draft. The draft
    does not grow before the target commits more."""

    def grows(self, output_len: int) -> bool:
        """Whether the sidecar is about to send more of the step draft after `output_len` tokens."""
        return self.has_steps and self.reported == output_len and self.complete_at != output_len


@dataclass
class Drafting:
    """State of a request at its sidecar. The clients in `engine.sidecar` alone change it."""

    submission: Submission | None = None
    """The open submission; None while there is none."""
    repairs: int = 0
    """Number of times that this sidecar has asked for missing tokens of the request."""
    declined: bool = False
    """Whether the present sidecar has refused to draft for the request."""
    route: Route | None = None
    """Digests of prompt and scope; None while a server with one sidecar needs none."""
