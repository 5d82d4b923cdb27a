"""The tries of all open requests, under one cap."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sglang_qspec.trie._native import STREAM_TOKENS, Trust, propose
from sglang_qspec.trie.insertion import Insertion
from sglang_qspec.trie.limits import TrieLimits
from sglang_qspec.trie.request import ANY_WIDTH, RequestTrie
from sglang_qspec.trie.source import Source
from sglang_qspec.trie.trees import DraftTrees


class TrieStore:
    """All tries by rid. What belongs to one request is reachable through its trie alone.

    Under pressure the drafts of the least valuable request go first: of those that wait for
    their first token the one opened last (it is served last), then of the others the one that was
    used longest ago. A request never displaces a more valuable one. `max_match` tokens of own
    text stay with every open request, over the cap if it must be.

    What one request teaches about a source's reliability, others profit from; it is no text.

    Not thread-safe: one thread (the scheduler's) owns the store and all its tries.
    """

    def __init__(self, limits: TrieLimits) -> None:
        self.limits = limits
        self.refused = dict.fromkeys(Insertion, 0)
        """Refused chunks since the start, by reason."""
        self.evictions = 0
        """Times that a request lost its drafts to the total cap."""
        self._trust = Trust(limits.max_match)
        self._tries: dict[str, RequestTrie] = {}
        self._next_serial = 0
        self._size = 0
        # Requests that have something to evict, by falling and by rising value.
        self._waiting: dict[str, RequestTrie] = {}
        self._used: dict[str, RequestTrie] = {}

    def __len__(self) -> int:
        return len(self._tries)

    def __contains__(self, rid: str) -> bool:
        return rid in self._tries

    @property
    def size(self) -> int:
        """What all tries hold, as `RequestTrie.size` counts it."""
        return self._size

    def open(
        self,
        rid: str,
        prompt_ids: Sequence[int],
        *,
        sources: Collection[Source] = tuple(Source),
        max_width: int = ANY_WIDTH,
    ) -> RequestTrie:
        """A new, empty trie for `rid`; an open one of the same rid is closed first."""
        self.close(rid)
        self._next_serial += 1
        trie = RequestTrie(
            prompt_ids,
            self.limits,
            self._next_serial,
            trust=self._trust,
            sources=sources,
            max_width=max_width,
        )
        self._tries[rid] = self._waiting[rid] = trie
        self._size += trie.size
        self._shrink(rid)
        return trie

    def close(self, rid: str) -> RequestTrie | None:
        """Free a request's trie and return it for its counts; None if it was not open."""
        trie = self._tries.pop(rid, None)
        if trie is not None:
            self._size -= trie.size
            self._waiting.pop(rid, None)
            self._used.pop(rid, None)
        return trie

    def get(self, rid: str) -> RequestTrie | None:
        """The trie of an open request. Change it only through the store, which counts tokens."""
        return self._tries.get(rid)

    def insert(
        self,
        rid: str,
        serial: int,
        source: Source,
        stream_id: int,
        base_len: int,
        start: int,
        token_ids: Sequence[int],
        *,
        greedy: bool = False,
    ) -> Insertion:
        """`RequestTrie.insert`, for the request that has this rid and this serial."""
        trie = self._tries.get(rid)
        if trie is None or trie.serial != serial:
            result = Insertion.UNKNOWN_REQUEST
        else:
            self._hold(rid, trie)
            count = len(token_ids) + STREAM_TOKENS
            if self._size + count > self.limits.max_total_tokens and not self._free(count, rid):
                result = Insertion.FULL
            else:
                before = trie.size
                result = trie.insert(source, stream_id, base_len, start, token_ids, greedy=greedy)
                self._size += trie.size - before
        if result.refused:
            self.refused[result] += 1
        return result

    def commit(self, rid: str, token_ids: Sequence[int]) -> None:
        """`RequestTrie.commit`. Raises KeyError if the request is not open."""
        trie = self._tries[rid]
        before = trie.size
        trie.commit(token_ids)
        self._size += trie.size - before
        self._waiting.pop(rid, None)
        self._used.pop(rid, None)
        self._used[rid] = trie
        self._shrink(rid)

    def propose(
        self,
        rids: Sequence[str | None],
        roots: Sequence[int],
        width: int,
        *,
        paused: Collection[Source] = (),
    ) -> DraftTrees:
        """A draft tree for each request, of at most `width` nodes and of its own `max_width`.

        No token comes from a source that is `paused`. `roots` are the last committed tokens; None,
        and a request that is not open, get no more.
        """
        sources = sum(1 << source for source in Source if source not in paused)
        tries = [
            trie.native if rid is not None and (trie := self._tries.get(rid)) else None
            for rid in rids
        ]
        return DraftTrees(*propose(tries, roots, width, self.limits.min_score, 0, sources))

    def _hold(self, rid: str, trie: RequestTrie) -> None:
        """See that a request which gets something can lose it again."""
        if rid not in self._waiting and rid not in self._used:
            (self._used if trie.output_len else self._waiting)[rid] = trie

    def _shrink(self, rid: str) -> None:
        """Return under the cap, if need be at the cost of `rid` itself."""
        if not self._free(0, rid):
            self._evict(rid)

    def _free(self, count: int, rid: str) -> bool:
        """Make room for `count` tokens, without touching `rid` or anything more valuable."""
        while self._size + count > self.limits.max_total_tokens:
            if self._waiting:
                victim = next(reversed(self._waiting))
            elif self._used:
                victim = next(iter(self._used))
            else:
                return False
            if victim == rid:
                return False
            self._evict(victim)
        return True

    def _evict(self, rid: str) -> None:
        trie = self._tries[rid]
        before = trie.size
        trie.evict()
        self._size += trie.size - before
        self._waiting.pop(rid, None)
        self._used.pop(rid, None)
        self.evictions += 1

    def check_integrity(self) -> None:
        """Raise RuntimeError where counts or orders contradict the tries."""
        for trie in self._tries.values():
            trie.check_integrity()
        if self._size != sum(trie.size for trie in self._tries.values()):
            raise RuntimeError(f"{self._size} tokens are not the tries' sizes")
        slack = self.limits.max_match * len(self._tries)
        if self._size > self.limits.max_total_tokens + slack:
            raise RuntimeError(f"{self._size} tokens are over the cap")
        for rid, trie in (*self._waiting.items(), *self._used.items()):
            if self._tries.get(rid) is not trie or (rid in self._waiting and rid in self._used):
                raise RuntimeError(f"request {rid!r} is in the wrong order of eviction")
