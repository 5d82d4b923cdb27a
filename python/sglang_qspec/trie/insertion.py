"""The result of adding draft tokens to a trie."""

from __future__ import annotations

from enum import Enum


class Insertion(Enum):
    """The result of inserting a chunk of draft tokens; all but the first two are refusals.

    The order is that of the enum in native/insertion.h, which has all but the last.
    """

    ADDED = "added"
    KNOWN = "all of its tokens are known already"
    NEGATIVE = "base_len or start is negative"
    AHEAD = "it continues from output that is not committed yet"
    GAP = "tokens between the known end of its stream and its start are missing"
    CONFLICT = "its tokens differ from the known tokens of its stream"
    BAD_TOKEN = "a token id outside the vocabulary"
    FULL = "the cap leaves no room for it"
    EVICTED = "its stream was dropped earlier to make room"
    UNKNOWN_REQUEST = "no open request has this rid and serial"

    @property
    def refused(self) -> bool:
        return self not in (Insertion.ADDED, Insertion.KNOWN)
