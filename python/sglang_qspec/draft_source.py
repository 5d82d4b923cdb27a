"""The sources of draft tokens.

Names in requests, settings, answers and metrics, and the colours of `qspec complete` and
`qspec show`, are made from this list.
"""

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
    HEAD = 5
    """A step draft of a head, from the target's hidden states."""
    JACOBI = 6
    """A guess that the target's own passes improve."""
    SECOND = 7
    """The token that the drafter of a step draft held to be the second likeliest."""


OF_STEPS = frozenset((Source.STEP, Source.HEAD))
"""Sources that the sidecar drafts while the request is served."""
OF_SIDECAR = OF_STEPS | {Source.QUEUE, Source.SECOND}
"""Sources that the sidecar drafts."""
DESCRIPTIONS = {
    Source.QUEUE: "completion drafted while the request waited",
    Source.GUESS: "guess of the client",
    Source.PROMPT: "looked up in the prompt",
    Source.OUTPUT: "looked up in the earlier output",
    Source.STEP: "drafted by the sidecar while the request ran",
    Source.HEAD: "drafted by the sidecar's head from the target's hidden states",
    Source.JACOBI: "guessed, and improved by earlier passes of the target",
    Source.SECOND: "the sidecar's second choice while the request ran",
}
"""What `qspec show` says of a token of each source."""
SOURCES = tuple(source.name.lower() for source in Source)
"""Names of the sources, as users write them."""
