"""What became of an attempt to add draft tokens."""

from __future__ import annotations

from enum import Enum


class Insertion(Enum):
    """What became of a chunk of draft tokens. Only the first two are not refusals.

    The order is that of the compiled part, which knows all but the last.
    """

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
