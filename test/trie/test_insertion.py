"""One request's trie adds the chunks that fit, and refuses the others."""

from __future__ import annotations

import pytest

from sglang_qspec.trie import Insertion, RequestTrie, Source, TrieLimits

LIMITS = TrieLimits(vocab_size=1000)


def test_a_completion_that_continues_output_starts_at_its_base() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.commit([2, 3])
    assert not trie.insert(Source.QUEUE, 0, 2, 0, [40, 41, 42]).refused
    assert trie.propose(4).token_ids == (3, 40, 41, 42)
    assert not trie.insert(Source.QUEUE, 1, 1, 0, [3, 50, 51]).refused
    assert set(trie.propose(8).token_ids) == {3, 40, 41, 42, 50, 51}
    trie.insert(Source.QUEUE, 2, 1, 0, [7, 60, 61])
    assert 60 not in trie.propose(20).token_ids


def test_a_stream_behind_the_output_is_followed_again_when_it_catches_up() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [10, 11], greedy=True)
    trie.commit([10, 11, 12, 13])
    assert len(trie.propose(8)) == 1
    trie.insert(Source.QUEUE, 0, 0, 2, [12], greedy=True)
    assert len(trie.propose(8)) == 1
    trie.insert(Source.QUEUE, 0, 0, 3, [13, 14, 15], greedy=True)
    assert trie.propose(8).token_ids == (13, 14, 15)


def test_repeated_and_overlapping_chunks_add_only_what_is_new() -> None:
    trie = RequestTrie([1], LIMITS)
    assert trie.insert(Source.QUEUE, 0, 0, 0, [10, 11, 12]) is Insertion.ADDED
    size = trie.size
    assert trie.insert(Source.QUEUE, 0, 0, 0, [10, 11, 12]) is Insertion.KNOWN
    assert trie.insert(Source.QUEUE, 0, 0, 1, [11]) is Insertion.KNOWN
    assert trie.insert(Source.QUEUE, 0, 0, 0, []) is Insertion.KNOWN
    assert trie.size == size
    assert trie.insert(Source.QUEUE, 0, 0, 1, [11, 12, 13]) is Insertion.ADDED
    assert trie.size == size + 1
    assert trie.propose(9).token_ids == (1, 10, 11, 12, 13)


def test_a_refused_chunk_changes_nothing() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [10, 11])
    before = trie.size, trie.propose(9)
    attempts = {
        Insertion.GAP: (Source.QUEUE, 0, 0, 3, [13]),
        Insertion.NEGATIVE: (Source.QUEUE, 0, 0, -1, [10]),
        Insertion.AHEAD: (Source.QUEUE, 0, 1, 0, [10]),
        Insertion.CONFLICT: (Source.QUEUE, 0, 0, 1, [99, 12]),
        Insertion.BAD_TOKEN: (Source.QUEUE, 1, 0, 0, [1000]),
    }
    for reason, chunk in attempts.items():
        assert trie.insert(*chunk) is reason
        assert reason.refused
    for token in (-1, 1 << 33, -(1 << 80), 1 << 80):
        assert trie.insert(Source.QUEUE, 1, 0, 0, [5, token]) is Insertion.BAD_TOKEN
    assert trie.insert(Source.QUEUE, 1, 1 << 80, 0, [5]) is Insertion.AHEAD
    assert trie.insert(Source.QUEUE, 1, 0, 1 << 80, [5]) is Insertion.GAP
    assert trie.insert(Source.QUEUE, 1, -(1 << 80), 0, [5]) is Insertion.NEGATIVE
    assert trie.insert(Source.QUEUE, 1, -1, 0, [5]) is Insertion.NEGATIVE
    assert trie.insert(Source.QUEUE, 1, 0, 1, [5]) is Insertion.GAP
    assert (trie.size, trie.propose(9)) == before
    trie.check_integrity()
    with pytest.raises(ValueError, match="OUTPUT"):
        trie.insert(Source.OUTPUT, 0, 0, 0, [1])
