"""One stream of draft tokens, and what became of an attempt to add to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_qspec.trie.source import Source

StreamKey = tuple[Source, int, int]
"""(source, stream_id, base_len): a redraft from a later base is a stream of its own."""


@dataclass(slots=True, eq=False)
class Stream:
    """A chain of nodes in the arena: the token before the draft, then the draft's tokens."""

    source: Source
    base_len: int
    """Committed output tokens before the stream's first token."""
    odds: tuple[float, ...]
    """What it is trusted with while it is followed, by match length."""
    number: int
    """The stream's number in the arena."""
    first: int
    """Node of the token before the first one."""
    last: int
    length: int = 0
    at: int = 0
    """Node up to which the stream is what was committed."""
    matched: int = 0
    """Tokens of the stream that were committed in its place, so far."""


class Insertion(Enum):
    """What became of a chunk of draft tokens. Only the first two are not refusals."""

    ADDED = "added"
    KNOWN = "all of it was there already"
    NEGATIVE = "a negative base_len or start"
    AHEAD = "it continues from output that is not committed yet"
    GAP = "tokens between it and what is known of its stream are missing"
    CONFLICT = "it contradicts what is known of its stream"
    BAD_TOKEN = "a token id outside the vocabulary"
    FULL = "no room"
    EVICTED = "its stream was dropped to make room"
    UNKNOWN_REQUEST = "the request is not open, or it is an earlier one of the same rid"

    @property
    def refused(self) -> bool:
        return self not in (Insertion.ADDED, Insertion.KNOWN)
