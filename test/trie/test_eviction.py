"""Evictions from one request's trie at its caps."""

from __future__ import annotations

from sglang_qspec.trie import Insertion, RequestTrie, Source, TrieLimits
from sglang_qspec.trie._native import STREAM_TOKENS

LIMITS = TrieLimits(vocab_size=1000)


def test_diverged_streams_are_evicted_first() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000, max_request_tokens=100))
    trie.insert(Source.QUEUE, 0, 0, 0, [10, *range(200, 240)])
    trie.insert(Source.QUEUE, 1, 0, 0, [11, *range(300, 340)])
    trie.commit([11])
    assert trie.insert(Source.QUEUE, 2, 1, 0, [*range(300, 340)]) is Insertion.ADDED
    trie.check_integrity()
    assert trie.insert(Source.QUEUE, 0, 0, 41, [240]) is Insertion.EVICTED
    assert trie.propose(3).token_ids == (11, 300, 301)
    assert trie.insert(Source.QUEUE, 3, 1, 0, [*range(500, 540)]) is Insertion.FULL
    assert trie.propose(3).token_ids == (11, 300, 301)
    trie.check_integrity()


def test_an_eviction_keeps_the_match_in_the_remaining_streams() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000, max_request_tokens=110))
    trie.insert(Source.QUEUE, 0, 0, 0, list(range(200, 240)))
    trie.insert(Source.GUESS, 0, 0, 0, list(range(300, 330)))
    trie.commit([7, 305, 306, 307])
    proposed = trie.propose(4)
    assert proposed.token_ids == (307, 308, 309, 310)
    assert trie.insert(Source.QUEUE, 1, 4, 0, [*range(400, 440)]) is Insertion.ADDED
    trie.check_integrity()
    tree = trie.propose(20)
    assert {308, 309, 310} < set(tree.token_ids)
    assert tree.sources[tree.token_ids.index(308)] is Source.GUESS


def test_a_stream_that_matched_again_is_evicted_after_one_that_did_not() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000, max_request_tokens=100))
    trie.insert(Source.QUEUE, 0, 0, 0, list(range(200, 220)))
    trie.insert(Source.QUEUE, 1, 0, 0, list(range(300, 340)))
    trie.commit([7, 205, 206])
    assert trie.insert(Source.QUEUE, 2, 3, 0, [*range(400, 440)]) is Insertion.ADDED
    assert 207 in trie.propose(20).token_ids
    assert trie.insert(Source.QUEUE, 1, 0, 40, [340]) is Insertion.EVICTED


def test_the_lookup_drops_the_oldest_tokens_of_a_long_output() -> None:
    limits = TrieLimits(vocab_size=1000, max_lookup_tokens=64, max_match=8)
    trie = RequestTrie(list(range(60)), limits)
    trie.insert(Source.QUEUE, 0, 0, 0, list(range(100, 300)), greedy=True)
    for token in range(100, 200):
        trie.commit([token])
        trie.check_integrity()
        assert trie.propose(2).token_ids == (token, token + 1)
    assert trie.size <= 64 + 201
    trie.commit([190, 191])
    assert trie.propose(2).token_ids[1] == 192
    trie.commit([10, 11])
    assert len(trie.propose(2)) == 1


def test_an_evicted_request_continues_without_its_drafts() -> None:
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [10, 11, 12])
    trie.commit([10])
    trie.evict()
    trie.check_integrity()
    assert trie.draft_size == 0
    assert len(trie.propose(8)) == 1
    assert trie.insert(Source.QUEUE, 0, 0, 3, [13]) is Insertion.EVICTED
    assert trie.insert(Source.QUEUE, 0, 1, 0, [11]) is Insertion.ADDED
    assert trie.propose(8).token_ids == (10, 11)


def test_drafts_behind_the_output_make_room_for_others() -> None:
    trie = RequestTrie([1, 2, 3], TrieLimits(vocab_size=1000, max_request_tokens=64))
    for number in range(64 // (STREAM_TOKENS + 1)):
        assert trie.insert(Source.STEP, number, 0, 0, [4]) is Insertion.ADDED
    assert trie.insert(Source.STEP, 32, 0, 0, [4]) is Insertion.FULL
    trie.commit([4, 5])
    assert trie.insert(Source.STEP, 33, 2, 0, [6, 7]) is Insertion.ADDED
    trie.check_integrity()
    assert trie.propose(4).token_ids == (5, 6, 7)
