"""The drafts of one request: inserted as they come, matched against what is committed."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from sglang_qspec.trie.arena import Index, TokenArena
from sglang_qspec.trie.evidence import odds_row
from sglang_qspec.trie.growth import Place, grow
from sglang_qspec.trie.limits import TrieLimits
from sglang_qspec.trie.matcher import Matcher
from sglang_qspec.trie.source import Source
from sglang_qspec.trie.stream import Insertion, Stream, StreamKey
from sglang_qspec.trie.tree import DraftTree

_PROMPT, _OUTPUT = 0, 1
"""Stream numbers of the own text: one chain of nodes, of which output is the later part."""


class RequestTrie:
    """Draft streams and own text of one request.

    A completion that continues exactly what is committed is *followed*: it proposes from its
    first token on, and with full trust for as long as the target commits it. Every stream, and
    the request's own text, is also searched for the last committed tokens (`Matcher`), so that
    after a divergence the request finds its way back into a completion.

    Streams may grow while they are matched. Not thread-safe: one thread owns it.
    """

    _tail: int
    """Node of the last committed token."""
    _text_size: int
    """Tokens of own text in the arena."""

    def __init__(self, prompt_ids: Sequence[int], limits: TrieLimits, serial: int = 0) -> None:
        self.serial = serial
        """Tells requests with the same rid apart; a store never uses one twice."""
        self.proposed = dict.fromkeys(Source, 0)
        """Draft tokens settled so far, by source."""
        self.accepted = dict.fromkeys(Source, 0)
        """Those of them that were accepted, by source."""
        self._limits = limits
        self._output = array("i")
        self._last_prompt_id = prompt_ids[-1] if len(prompt_ids) else 0
        self._evicted: set[StreamKey] = set()
        self._streams: dict[StreamKey, Stream] = {}
        self._followed: list[Stream] = []
        self._matcher = Matcher(limits)
        self._begin(_usable_text(prompt_ids, limits), ())
        self._matcher.discover(self._arena, self._tail, self._drafts)

    @property
    def output_len(self) -> int:
        """Output tokens committed so far."""
        return len(self._output)

    @property
    def size(self) -> int:
        """Tokens in memory: drafts, own text, and one of context for each stream."""
        return len(self._arena)

    @property
    def draft_size(self) -> int:
        """Those of them that belong to drafts."""
        return len(self._arena) - self._text_size

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
        if source not in (Source.QUEUE, Source.GUESS):
            raise ValueError(f"source is {source.name}, but a draft's is QUEUE or GUESS")
        if base_len < 0 or start < 0:
            return Insertion.NEGATIVE
        key = (source, stream_id, base_len)
        if key in self._evicted:
            return Insertion.EVICTED
        if base_len > len(self._output):
            return Insertion.AHEAD
        stream = self._streams.get(key)
        known = stream.length if stream else 0
        if start > known:
            return Insertion.GAP
        fresh = token_ids[known - start :]
        if not fresh:
            return Insertion.KNOWN
        if min(fresh) < 0 or max(fresh) >= self._limits.vocab_size:
            return Insertion.BAD_TOKEN
        if stream and not self._ends_with(stream, token_ids[: known - start]):
            return Insertion.CONFLICT
        if not self._make_room(len(fresh) + (stream is None), stream):
            return Insertion.FULL
        if stream is None:
            stream = self._streams[key] = self._open_stream(source, base_len, greedy)
        self._append(stream, fresh)
        return Insertion.ADDED

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append output tokens of the target and follow them in all streams."""
        if not token_ids:
            return
        self._output.extend(token_ids)
        self._tail = self._arena.extend(self._tail, token_ids, _OUTPUT, self._text)
        self._text_size += len(token_ids)
        self._followed = [stream for stream in self._followed if self._follow(stream)]
        self._matcher.advance(self._arena, token_ids)
        self._matcher.discover(self._arena, self._tail, self._drafts)
        if self._text_size > self._limits.max_lookup_tokens:
            self._rebuild(self._limits.max_lookup_tokens // 2, self._streams)

    def propose(self, width: int) -> DraftTree:
        """The draft tree of at most `width` nodes, the root (last committed token) included."""
        cap = self._limits.max_match
        places: dict[int, Place] = {}
        for node, length in self._matcher.lengths.items():
            source, odds = self._found[self._arena.stream[node]]
            places[node] = (node, length, source, odds)
        for stream in self._followed:
            # One that lags behind the output has no next token, so it proposes nothing.
            length = min(stream.matched + 1, cap)
            places[stream.at] = (stream.at, length, stream.source, stream.odds)
        if self._output:
            root = (self._output[-1], Source.OUTPUT)
        else:
            root = (self._last_prompt_id, Source.PROMPT)
        return grow(root, list(places.values()), self._arena, width, self._limits.min_score)

    def settle(self, tree: DraftTree, accepted: Iterable[int]) -> dict[Source, int]:
        """Count a verified tree; the accepted tokens by source.

        `accepted` are indices of nodes. The root and padding (indices past the tree) are no
        drafts and not counted. Of a tree that was verified in part only that part may be given.
        """
        for source in tree.sources[1:]:
            self.proposed[source] += 1
        counts = dict.fromkeys(Source, 0)
        for node in accepted:
            if 0 < node < len(tree):
                counts[tree.sources[node]] += 1
        for source, count in counts.items():
            self.accepted[source] += count
        return counts

    def evict(self) -> None:
        """Drop all drafts, and all own text but what the next matches need."""
        self._evicted.update(self._streams)
        self._rebuild(self._limits.max_match, ())

    def _open_stream(self, source: Source, base_len: int, greedy: bool) -> Stream:
        context = self._output[base_len - 1] if base_len else self._last_prompt_id
        if not 0 <= context < self._limits.vocab_size:
            context = 0  # only ever compared, never proposed
        number, cap = len(self._found), self._limits.max_match
        self._found.append((source, odds_row(source, greedy, False, cap)))
        first = self._arena.begin(context, number)
        odds = odds_row(source, greedy, True, cap)
        stream = Stream(source, base_len, odds, number, first, last=first, at=first)
        self._followed.append(stream)
        return stream

    def _append(self, stream: Stream, token_ids: Sequence[int]) -> None:
        first = len(self._arena) + 1
        stream.last = self._arena.extend(stream.last, token_ids, stream.number, self._drafts)
        stream.length += len(token_ids)
        if stream in self._followed and not self._follow(stream):
            self._followed.remove(stream)
        tail_id = self._arena.token[self._tail]
        if tail_id in token_ids:
            for node, token in enumerate(token_ids, first):
                if token == tail_id:
                    self._matcher.notice(self._arena, self._tail, node)

    def _follow(self, stream: Stream) -> bool:
        """Go along what was committed; False once the stream has something else there."""
        output, following, token_of = self._output, self._arena.next, self._arena.token
        for place in range(stream.base_len + stream.matched, len(output)):
            node = following[stream.at]
            if not node:
                break
            if token_of[node] != output[place]:
                return False
            stream.at = node
            stream.matched += 1
        return True

    def _ends_with(self, stream: Stream, token_ids: Sequence[int]) -> bool:
        node = stream.last
        for token in reversed(token_ids):
            if self._arena.token[node] != token:
                return False
            node = self._arena.prev[node]
        return True

    def _make_room(self, count: int, spared: Stream | None) -> bool:
        """Let `count` more draft tokens fit, by dropping streams that are followed no longer."""
        cap = self._limits.max_request_tokens
        if self.draft_size + count <= cap:
            return True
        alive = {self._arena.stream[node] for node in self._matcher.lengths}
        victims = sorted(
            (
                (stream.number in alive, stream.source is Source.GUESS, stream.number, key)
                for key, stream in self._streams.items()
                if stream is not spared and stream not in self._followed
            )
        )
        kept = dict(self._streams)
        size = self.draft_size
        for *_, key in victims:
            # A quarter more than needed, so that rebuilding costs O(1) for each inserted token.
            if size + count <= cap - cap // 4:
                break
            size -= kept.pop(key).length + 1
        if size + count > cap:
            return False
        self._evicted.update(self._streams.keys() - kept.keys())
        self._rebuild(self._text_size, kept)
        return True

    def _begin(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Start an arena with the own text; without any, token 0 stands for the context."""
        if not prompt_ids and not output_ids:
            prompt_ids = (0,)
        number = _PROMPT if prompt_ids else _OUTPUT
        text = (*prompt_ids, *output_ids)
        self._arena = TokenArena()
        self._drafts: Index = {}
        self._text: Index = {}
        self._tail = self._arena.begin(text[0], number)
        prompt_end = max(1, len(prompt_ids))
        for number, token_ids in ((_PROMPT, text[1:prompt_end]), (_OUTPUT, text[prompt_end:])):
            self._tail = self._arena.extend(self._tail, token_ids, number, self._text)
        self._text_size = len(self._arena)
        self._found = [
            (source, odds_row(source, False, False, self._limits.max_match))
            for source in (Source.PROMPT, Source.OUTPUT)
        ]

    def _rebuild(self, text_size: int, kept: Collection[StreamKey]) -> None:
        """Copy the last `text_size` tokens of the own text and the `kept` streams to a new arena.

        The only way to free tokens. It costs O(what stays), so callers free a share of the whole.
        """
        old, old_found = self._arena, self._found
        own = [self._tail]
        while len(own) < text_size and old.prev[own[-1]]:
            own.append(old.prev[own[-1]])
        own.reverse()
        prompt_size = sum(old.stream[node] == _PROMPT for node in own)
        text = [old.token[node] for node in own]
        self._begin(text[:prompt_size], text[prompt_size:])
        moved = dict(zip(own, range(1, len(own) + 1), strict=True))
        self._streams = {key: stream for key, stream in self._streams.items() if key in kept}
        for stream in self._streams.values():
            nodes = list(old.chain(stream.first))
            self._found.append(old_found[stream.number])
            stream.number = len(self._found) - 1
            stream.first = self._arena.begin(old.token[nodes[0]], stream.number)
            rest = [old.token[node] for node in nodes[1:]]
            stream.last = self._arena.extend(stream.first, rest, stream.number, self._drafts)
            moved.update(zip(nodes, range(stream.first, stream.last + 1), strict=True))
            stream.at = moved[stream.at]
        staying = self._streams.values()
        self._followed = [stream for stream in self._followed if stream in staying]
        self._matcher.move(self._arena, self._tail, moved)

    def check_integrity(self) -> None:
        """Raise RuntimeError where the parts of the state contradict each other."""
        self._arena.check_integrity((self._drafts, self._text))
        self._matcher.check_integrity(self._arena, self._tail)
        streams = self._streams.values()
        if self.draft_size != sum(stream.length + 1 for stream in streams):
            raise RuntimeError(f"{self.draft_size} draft tokens are not the streams' lengths")
        if self.draft_size > self._limits.max_request_tokens:
            raise RuntimeError(f"{self.draft_size} draft tokens are over the cap")
        if self._text_size > self._limits.max_lookup_tokens:
            raise RuntimeError(f"{self._text_size} tokens of own text are over the cap")
        for stream in streams:
            nodes = list(self._arena.chain(stream.first))
            if len(nodes) != stream.length + 1 or nodes[-1] != stream.last:
                raise RuntimeError(f"a stream of {stream.length} tokens has {len(nodes) - 1}")
            if nodes[stream.matched] != stream.at:
                raise RuntimeError("a stream is followed at another place than it matched to")
        for stream in self._followed:
            if stream not in streams:
                raise RuntimeError("a stream is followed that is not kept")


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
