"""The compiled trie (native/*.h), called by `request`, `trees` and `store`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STREAM_TOKENS: int
"""Extra tokens that the caps count for each stream, for the memory of the stream itself."""
MOST_TOKENS: int
"""Upper limit of each cap of a trie; node numbers have 32 bits."""
MOST_MATCH: int
"""Upper limit of `max_match`."""

class Trust:
    """Estimates how likely a matching stream's next token is right; learns from all commits."""

    def __init__(self, max_match: int, learns: bool = True) -> None: ...

class Trie:
    """One request's streams and own text. `RequestTrie` opens it."""

    def __init__(
        self,
        usable_prompt: Sequence[int],
        last_prompt_id: int,
        *,
        vocab_size: int,
        max_request_tokens: int,
        max_lookup_tokens: int,
        max_match: int,
        max_cursors: int,
        max_scan: int,
        trust: Trust,
        sources: int,
        max_width: int,
    ) -> None: ...
    @property
    def output_len(self) -> int:
        """Output tokens committed so far."""
    @property
    def size(self) -> int:
        """Size that the caps count: draft and own tokens, plus `STREAM_TOKENS` for each stream."""
    @property
    def draft_size(self) -> int:
        """The part of `size` that drafts take."""
    @property
    def bytes(self) -> int:
        """Allocated memory in bytes, unused capacity included."""
    @property
    def last_token(self) -> int:
        """The last committed token; before any output the last token of the prompt."""
    def insert_chunk(
        self,
        source: int,
        stream_id: int,
        base_len: int,
        start: int,
        token_ids: Sequence[int],
        second_ids: Sequence[int],
        greedy: bool,
    ) -> int:
        """`RequestTrie.insert`; the result is an index of the members of `Insertion`."""
    def commit(self, token_ids: Sequence[int]) -> None:
        """Append output tokens of the target, and update all matches."""
    def match_length(self, sources: int) -> int:
        """`RequestTrie.longest_match` over `sources`, one bit for each."""
    def evict(self) -> None:
        """Drop all drafts and all own text except its last `max_match` tokens."""
    def check_integrity(self) -> None:
        """Raise RuntimeError if the parts of the state contradict each other."""

def propose(
    tries: Sequence[Trie | None],
    roots: Sequence[int],
    width: int,
    floor: float,
    sources: int = ...,
) -> tuple[
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.uint8],
    NDArray[np.float32],
    NDArray[np.int32],
]:
    """Token ids, parents, sources and scores, each [n, width], and sizes [n]: `DraftTrees`."""

def lay_out(
    parents: NDArray[np.int32], sizes: NDArray[np.int32]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Mask, depths, first children and next siblings: `TreeLayout`."""

def count_by_source(sources: NDArray[np.uint8], sizes: NDArray[np.int32]) -> list[int]:
    """Number of nodes of each source, without roots and padding."""

def count_by_position(
    parents: NDArray[np.int32],
    sources: NDArray[np.uint8],
    sizes: NDArray[np.int32],
    paths: Sequence[Sequence[int]],
    judged: NDArray[np.int64],
    accepted: NDArray[np.int64],
) -> None:
    """Add to `judged` and `accepted` [sources, positions]: `DraftTrees.count_by_position`."""
