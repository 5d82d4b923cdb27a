"""The trie of one request: its draft streams, matched against its committed tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from sglang_qspec.draft_source import OF_SIDECAR, Source
from sglang_qspec.trie._native import Trie, Trust, propose
from sglang_qspec.trie.insertion import Insertion
from sglang_qspec.trie.limits import TrieLimits
from sglang_qspec.trie.tree import DraftTree
from sglang_qspec.trie.trees import DraftTrees

ANY_WIDTH = 1 << 30
"""Default `max_width`: only the pass limits the width of a tree."""

_DRAFTED = (OF_SIDECAR - {Source.SECOND}) | {Source.GUESS, Source.JACOBI}
_INSERTIONS = tuple(Insertion)


class RequestTrie(Trie):
    """Draft streams of one request, and its own text (prompt and output).

    A stream is *followed* as long as the output since its base agrees with it. A followed stream
    proposes its next token even without a match of several tokens, with a higher estimated
    probability than other matches. The trie also searches all streams and the own text for the
    last committed tokens. So a completion from which the output diverged can be used again.

    Streams may grow while they are matched. Not thread-safe: one thread owns the trie.
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
        """Open an empty trie for a prompt.

        Requests with the same `trust` learn from each other. Only `sources` are proposed, in trees
        of at most `max_width` nodes.
        """
        self.serial = serial
        """Distinguishes requests with the same rid; a store never uses a serial twice."""
        self._limits = limits
        last = prompt_ids[-1] if len(prompt_ids) else 0
        super().__init__(
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

    def insert(
        self,
        source: Source,
        stream_id: int,
        base_len: int,
        start: int,
        token_ids: Sequence[int],
        *,
        second_ids: Sequence[int] = (),
        greedy: bool = False,
    ) -> Insertion:
        """Add the draft tokens of a stream from position `start` on.

        `source`, `stream_id` and `base_len` identify the stream, which continues the prompt and
        `base_len` output tokens. `greedy` in its first chunk says whether the stream was decoded
        greedily; for JACOBI, whether the target has improved it. `second_ids` are the drafter's
        second choices in place of `token_ids`, if it has told them, and are proposed as SECOND.
        Chunks may repeat or overlap known tokens. A refused chunk changes nothing. Raises
        ValueError for PROMPT, OUTPUT and SECOND, which have no streams, and for another number of
        `second_ids`.
        """
        if source not in _DRAFTED:
            raise ValueError(
                f"source is {source.name}, but a draft's is QUEUE, GUESS, STEP, HEAD or JACOBI"
            )
        found = self.insert_chunk(source, stream_id, base_len, start, token_ids, second_ids, greedy)
        return _INSERTIONS[found]

    def propose(self, width: int) -> DraftTree:
        """The draft tree of at most `width` nodes, the root (last committed token) included.

        Before any output, the root of a prompt that ends outside the vocabulary is token 0.
        """
        arrays = propose([self], [self.last_token], width, self._limits.min_score)
        return DraftTrees(*arrays)[0]

    def longest_match(self, paused: Collection[Source] = ()) -> int:
        """Length of the longest match that proposes a token now, in tokens; 0 for none.

        A match is a run of the last committed tokens, at most `max_match`, that also occurs in a
        stream or in the own text. For a followed stream it is the part that the output has
        confirmed, and the token before the stream. Matches of `paused` sources do not count.
        """
        return self.match_length(bits_of(paused))


def bits_of(paused: Collection[Source]) -> int:
    """The sources that are not `paused`, as the native tries expect them: one bit for each."""
    return sum(1 << source for source in Source if source not in paused)


def _usable_text(prompt_ids: Sequence[int], limits: TrieLimits) -> list[int]:
    """Return the end of a prompt that may be searched: ids in the vocabulary, within the cap.

    Ids outside the vocabulary stand for images and other inputs without text.
    """
    ids = np.asarray(prompt_ids, dtype=np.int64)
    foreign = np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))
    if len(foreign):
        ids = ids[foreign[-1] + 1 :]
    if len(ids) > limits.max_lookup_tokens:
        ids = ids[-(limits.max_lookup_tokens // 2) :]
    usable: list[int] = ids.tolist()
    return usable
