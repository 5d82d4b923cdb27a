"""Where a draft token came from."""

from __future__ import annotations

from enum import IntEnum


class Source(IntEnum):
    """Whose token a draft token is; accepted tokens are counted by it."""

    QUEUE = 0
    """A completion that the sidecar drafted while the request waited."""
    GUESS = 1
    """A guess that the client sent with its request."""
    PROMPT = 2
    """The request's own prompt (prompt lookup)."""
    OUTPUT = 3
    """The request's own output so far."""
    STEP = 4
    """The sidecar's draft from what is committed, while the request is served."""
