"""The tries of all open requests, under one cap on their total size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sglang_qspec.draft_source import Source
from sglang_qspec.trie._native import STREAM_TOKENS, Trust, propose
from sglang_qspec.trie.insertion import Insertion
from sglang_qspec.trie.limits import TrieLimits
from sglang_qspec.trie.request import ANY_WIDTH, RequestTrie, bits_of
from sglang_qspec.trie.trees import DraftTrees


class TrieStore:
    """All tries by rid; the tokens of a request are reachable through its own trie only.

    Over the cap, the store evicts the least valuable request first. Requests without output go
    first, the request opened last before the others, because it is served last. Then go requests
    with output, the oldest last commit first. A request never evicts a more valuable request. Every
    open request keeps `max_match` tokens of its own text, even over the cap.

    The tries share acceptance statistics (`Trust`), but no text.

    Not thread-safe: one thread (the scheduler's) owns the store and all its tries.
    """

    def __init__(self, limits: TrieLimits) -> None:
        self.limits = limits
        self.refused = dict.fromkeys(Insertion, 0)
        """Number of refused chunks since the start, by reason."""
        self.evictions = 0
        """Number of times that the store dropped the drafts of a request because of the cap."""
        self._trust = Trust(limits.max_match)
        self._tries: dict[str, RequestTrie] = {}
        self._next_serial = 0
        self._size = 0
        # Evictable requests: without output by falling value, with output by rising value.
        self._waiting: dict[str, RequestTrie] = {}
        self._used: dict[str, RequestTrie] = {}

    def __len__(self) -> int:
        return len(self._tries)

    def __contains__(self, rid: str) -> bool:
        return rid in self._tries

    @property
    def size(self) -> int:
        """Sum of `RequestTrie.size` over all open requests."""
        return self._size

    def describe(self) -> dict[str, Any]:
        """Size, evictions and refused chunks, for /server_info and /metrics."""
        return {
            "trie_tokens": self._size,
            "evictions": self.evictions,
            "refused_chunks": {
                reason.name.lower(): count
                for reason, count in self.refused.items()
                if reason.refused
            },
        }

    def open(
        self,
        rid: str,
        prompt_ids: Sequence[int],
        *,
        sources: Collection[Source] = tuple(Source),
        max_width: int = ANY_WIDTH,
    ) -> RequestTrie:
        """Open an empty trie for `rid`; an open trie of the same rid is closed first."""
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
        """Remove and return a request's trie; None if it was not open."""
        trie = self._tries.pop(rid, None)
        if trie is not None:
            self._size -= trie.size
            self._waiting.pop(rid, None)
            self._used.pop(rid, None)
        return trie

    def get(self, rid: str) -> RequestTrie | None:
        """The trie of an open request, or None. Change it only through the store."""
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
        second_ids: Sequence[int] = (),
        greedy: bool = False,
    ) -> Insertion:
        """`RequestTrie.insert` for the open request with this rid and serial."""
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
                result = trie.insert(
                    source,
                    stream_id,
                    base_len,
                    start,
                    token_ids,
                    second_ids=second_ids,
                    greedy=greedy,
                )
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
        """A draft tree for each request, of at most `width` nodes and its own `max_width`.

        `roots` are the last committed tokens. No token comes from a `paused` source. For None, or a
        request that is not open, the tree is the root alone.
        """
        tries = [None if rid is None else self._tries.get(rid) for rid in rids]
        allowed = bits_of(paused)
        return DraftTrees(*propose(tries, roots, width, self.limits.min_score, allowed))

    def _hold(self, rid: str, trie: RequestTrie) -> None:
        """Make an evicted request evictable again, because it is about to get tokens."""
        if rid not in self._waiting and rid not in self._used:
            (self._used if trie.output_len else self._waiting)[rid] = trie

    def _shrink(self, rid: str) -> None:
        """Evict requests until the size is within the cap, and at last `rid` itself."""
        if not self._free(0, rid):
            self._evict(rid)

    def _free(self, count: int, rid: str) -> bool:
        """Make room for `count` tokens by evicting requests of less value than `rid`.

        Returns False if that does not suffice.
        """
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
        """Raise RuntimeError if the counts or the eviction orders contradict the tries."""
        for trie in self._tries.values():
            trie.check_integrity()
        if self._size != sum(trie.size for trie in self._tries.values()):
            raise RuntimeError(f"{self._size} tokens are counted, but the tries differ")
        slack = self.limits.max_match * len(self._tries)
        if self._size > self.limits.max_total_tokens + slack:
            raise RuntimeError(f"the tries hold {self._size} tokens, which is over the cap")
        for rid, trie in (*self._waiting.items(), *self._used.items()):
            if self._tries.get(rid) is not trie or (rid in self._waiting and rid in self._used):
                raise RuntimeError(f"request {rid!r} is closed, or in both orders of eviction")
