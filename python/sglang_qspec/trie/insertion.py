"""The result of adding draft tokens to a trie."""

from __future__ import annotations

from enum import Enum


class Insertion(Enum):
    """The result of inserting a chunk of draft tokens; all except ADDED and KNOWN are refusals.

    The enum in native/insertion.h has the same order, without UNKNOWN_REQUEST.
    """

    ADDED = "added"
    KNOWN = "the trie has all of its tokens already"
    NEGATIVE = "base_len or start is negative"
    AHEAD = "it continues from output that is not committed yet"
    GAP = "tokens between the end of its stream and its start are missing"
    CONFLICT = "its tokens differ from those of its stream"
    BAD_TOKEN = "it has a token id outside the vocabulary"
    FULL = "it does not fit under the cap"
    EVICTED = "its stream was dropped earlier to make room"
    UNKNOWN_REQUEST = "no open request has this rid and serial"

    @property
    def refused(self) -> bool:
        return self not in (Insertion.ADDED, Insertion.KNOWN)
