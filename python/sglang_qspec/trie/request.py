"""The drafts of one request: inserted as they come, matched against what is committed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from sglang_qspec.trie._native import Trie, Trust, propose
from sglang_qspec.trie.insertion import Insertion
from sglang_qspec.trie.limits import TrieLimits
from sglang_qspec.trie.source import Source
from sglang_qspec.trie.tree import DraftTree
from sglang_qspec.trie.trees import DraftTrees

ANY_WIDTH = 1 << 30
"""No limit to the nodes of a tree but that of the pass."""

_INSERTIONS = tuple(Insertion)


class RequestTrie:
    """Draft streams and own text of one request.

    A completion that continues exactly what is committed is *followed*: it proposes from its
    first token on, and with full trust for as long as the target commits it. Every stream, and
    the request's own text, is also searched for the last committed tokens, so that after a
    divergence the request finds its way back into a completion.

    Streams may grow while they are matched. Not thread-safe: one thread owns it.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        limits: TrieLimits,
        serial: int = 0,
        *,
        trust: Trust | None = None,
        sources: Collection[Source] = tuple(Source),
        max_width: int = ANY_WIDTH,
    ) -> None:
        """`trust` is shared by requests that should learn from each other; `sources` are those
        that may be proposed, in trees of at most `max_width` nodes."""
        self.serial = serial
        """Tells requests with the same rid apart; a store never uses one twice."""
        self._limits = limits
        last = prompt_ids[-1] if len(prompt_ids) else 0
        self.native = Trie(
            _usable_text(prompt_ids, limits),
            last if 0 <= last < limits.vocab_size else 0,
            vocab_size=limits.vocab_size,
            max_request_tokens=limits.max_request_tokens,
            max_lookup_tokens=limits.max_lookup_tokens,
            max_match=limits.max_match,
            max_cursors=limits.max_cursors,
            max_scan=limits.max_scan,
            trust=Trust(limits.max_match) if trust is None else trust,
            sources=sum(1 << source for source in sources),
            max_width=max_width,
        )

    @property
    def output_len(self) -> int:
        """Output tokens committed so far."""
        return self.native.output_len

    @property
    def size(self) -> int:
        """What caps count: tokens of drafts and own text, and `STREAM_TOKENS` for each stream."""
        return self.native.size

    @property
    def draft_size(self) -> int:
        """The part of `size` that belongs to drafts."""
        return self.native.draft_size

    @property
    def bytes(self) -> int:
        """Memory that they take, allocated bytes that are still free included."""
        return self.native.bytes

    def insert(
        self,
        source: Source,
        stream_id: int,
        base_len: int,
        start: int,
        token_ids: Sequence[int],
        *,
        greedy: bool = False,
    ) -> Insertion:
        """Add draft tokens `start`, `start` + 1, ... of a stream.

        The stream is the draft `stream_id` of a source that continues prompt + `base_len` tokens
        of output; its first chunk says whether it was decoded greedily. Chunks may repeat or
        overlap what is there. A refused chunk changes nothing. Raises ValueError for a source
        that is not a draft's.
        """
        if source not in (Source.QUEUE, Source.GUESS, Source.STEP):
            raise ValueError(f"source is {source.name}, but a draft's is QUEUE, GUESS or STEP")
        return _INSERTIONS[
            self.native.insert(source, stream_id, base_len, start, token_ids, greedy)
        ]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append output tokens of the target and follow them in all streams."""
        self.native.commit(token_ids)

    def propose(self, width: int, policy: int = 0) -> DraftTree:
        """The draft tree of at most `width` nodes, the root (last committed token) included.

        `policy` is an index of `_native.POLICIES`: the benchmark compares others with the first.
        Without output, a last prompt token outside the vocabulary is given as 0.
        """
        native = self.native
        arrays = propose([native], [native.last_token], width, self._limits.min_score, policy)
        return DraftTrees(*arrays)[0]

    def evict(self) -> None:
        """Drop all drafts, and all own text but what the next matches need."""
        self.native.evict()

    def check_integrity(self) -> None:
        """Raise RuntimeError where the parts of the state contradict each other."""
        self.native.check_integrity()


def _usable_text(prompt_ids: Sequence[int], limits: TrieLimits) -> list[int]:
    """The end of a prompt that may be searched: in the vocabulary, and not over the cap.

    Ids outside the vocabulary stand for images and the like.
    """
    ids = np.asarray(prompt_ids, dtype=np.int64)
    foreign = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if len(foreign):
        ids = ids[foreign[-1] + 1 :]
    if len(ids) > limits.max_lookup_tokens:
        ids = ids[-(limits.max_lookup_tokens // 2) :]
    usable: list[int] = ids.tolist()
    return usable
