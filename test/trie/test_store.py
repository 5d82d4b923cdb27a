"""Many requests under one cap: eviction, isolation, reuse of request ids."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_qspec.trie import Insertion, RequestTrie, Source, TrieLimits, TrieStore

LIMITS = TrieLimits(
    vocab_size=1 << 20,
    max_request_tokens=40,
    max_total_tokens=160,
    max_lookup_tokens=32,
    max_match=4,
)
SPAN = 10
"""Number of token ids per request; each id belongs to one request."""


def ids(serial: int, values: list[int]) -> list[int]:
    return [serial * SPAN + value for value in values]


rids = st.sampled_from(["a", "b", "c", "d", "e"])
values = st.lists(st.integers(0, SPAN - 1), min_size=1, max_size=12)


class ManyRequests(RuleBasedStateMachine):
    """Random operations; no request gets a token of another or an earlier request."""

    def __init__(self) -> None:
        super().__init__()
        self.store = TrieStore(LIMITS)
        self.last_serial = 0

    def trie(self, rid: str) -> RequestTrie | None:
        return self.store.get(rid)

    @rule(rid=rids, prompt=values)
    def open(self, rid: str, prompt: list[int]) -> None:
        trie = self.store.open(rid, ids(self.last_serial + 1, prompt))
        assert trie.serial > self.last_serial
        self.last_serial = trie.serial

    @rule(rid=rids)
    def close(self, rid: str) -> None:
        self.store.close(rid)
        assert rid not in self.store

    @rule(
        rid=rids,
        stream_id=st.integers(0, 3),
        back=st.integers(0, 5),
        start=st.integers(0, 6),
        chunk=values,
        source=st.sampled_from([Source.QUEUE, Source.GUESS]),
    )
    def insert(
        self, rid: str, stream_id: int, back: int, start: int, chunk: list[int], source: Source
    ) -> None:
        trie = self.trie(rid)
        if trie:
            base_len = max(0, trie.output_len - back)
            token_ids = ids(trie.serial, chunk)
            self.store.insert(rid, trie.serial, source, stream_id, base_len, start, token_ids)

    @rule(rid=rids, chunk=values)
    def insert_late(self, rid: str, chunk: list[int]) -> None:
        trie = self.trie(rid)
        serial = trie.serial - 1 if trie else 1
        result = self.store.insert(rid, serial, Source.QUEUE, 0, 0, 0, ids(serial, chunk))
        assert result is Insertion.UNKNOWN_REQUEST

    @rule(rid=rids, chunk=values)
    def commit(self, rid: str, chunk: list[int]) -> None:
        trie = self.trie(rid)
        if trie:
            self.store.commit(rid, ids(trie.serial, chunk))

    @invariant()
    def drafts_are_the_request_s_own(self) -> None:
        for rid in "abcde":
            trie = self.trie(rid)
            if trie:
                tree = trie.propose(16)
                tree.check_integrity()
                assert {token // SPAN for token in tree.token_ids} == {trie.serial}

    @invariant()
    def state_is_sound_and_within_the_cap(self) -> None:
        self.store.check_integrity()
        if not len(self.store):
            assert self.store.size == 0


ManyRequests.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestManyRequests = ManyRequests.TestCase


def fill(store: TrieStore, rid: str, count: int) -> Insertion:
    trie = store.get(rid)
    assert trie
    drafts = [7] * count
    return store.insert(rid, trie.serial, Source.QUEUE, 0, trie.output_len, 0, drafts)


def drafts_left(store: TrieStore) -> set[str]:
    return {rid for rid in "abcdef" if (trie := store.get(rid)) and trie.draft_size}


def test_waiting_requests_lose_their_drafts_first_and_the_last_opened_before_others() -> None:
    store = TrieStore(LIMITS)
    for rid in "abcd":
        store.open(rid, [1])
        assert fill(store, rid, 34) is Insertion.ADDED
    store.commit("a", [2])
    assert store.evictions == 0
    store.open("e", [1])
    assert fill(store, "e", 34) is Insertion.FULL
    store.close("e")
    store.commit("b", [2] * 30)
    assert drafts_left(store) == {"a", "b", "c"}
    store.commit("c", [2] * 30)
    assert drafts_left(store) == {"b", "c"}
    assert store.evictions == 2
    store.check_integrity()


def test_drafts_of_a_running_request_displace_those_of_the_least_recently_used() -> None:
    store = TrieStore(LIMITS)
    for rid in "abcd":
        store.open(rid, [1])
        store.commit(rid, [2])
        assert fill(store, rid, 27) is Insertion.ADDED
    store.commit("a", [3])
    store.commit("d", [3] * 25)
    assert store.evictions == 0
    store.commit("c", [3] * 25)
    assert drafts_left(store) == {"a", "c", "d"}


def test_a_prompt_that_does_not_fit_is_no_error() -> None:
    store = TrieStore(LIMITS)
    for number in range(12):
        store.open(str(number), [1] * 30)
        store.check_integrity()
    trie = store.get("11")
    assert trie
    assert trie.size == LIMITS.max_match


def test_a_closed_request_leaves_no_tokens() -> None:
    store = TrieStore(LIMITS)
    trie = store.open("a", [1])
    store.insert("a", trie.serial, Source.QUEUE, 0, 0, 0, [5, 6], greedy=True)
    store.close("a")
    store.close("a")
    assert store.size == len(store) == 0


def test_a_batch_of_trees_has_a_row_for_every_request_open_or_not() -> None:
    store = TrieStore(LIMITS)
    for rid, draft in (("a", [5, 6, 7]), ("b", [8])):
        trie = store.open(rid, [1])
        store.insert(rid, trie.serial, Source.QUEUE, 0, 0, 0, draft, greedy=True)
    trees = store.propose(["b", "?", "a"], [1, 4, 1], 3)
    assert [trees[row].token_ids for row in range(len(trees))] == [(1, 8), (4,), (1, 5, 6)]
    assert trees.count_by_source()[Source.QUEUE] == 3
    assert len(store.propose([], [], 3)) == 0


def test_refusals_are_counted_by_reason() -> None:
    store = TrieStore(LIMITS)
    store.insert("a", 1, Source.QUEUE, 0, 0, 0, [1])
    trie = store.open("a", [1])
    store.insert("a", trie.serial, Source.QUEUE, 0, 0, 4, [1])
    assert store.refused[Insertion.UNKNOWN_REQUEST] == 1
    assert store.refused[Insertion.GAP] == 1
    assert sum(store.refused.values()) == 2
