"""The source of a draft token."""

from __future__ import annotations

from enum import IntEnum


class Source(IntEnum):
    """The source of a draft token; acceptance is counted by source."""

    QUEUE = 0
    """A completion that the sidecar drafted while the request waited in the queue."""
    GUESS = 1
    """A guess that the client sent with its request."""
    PROMPT = 2
    """The request's own prompt (prompt lookup)."""
    OUTPUT = 3
    """The request's own output so far."""
    STEP = 4
    """A step draft: the sidecar's continuation of the committed tokens while the request is
    served."""
