"""The memory of one request's trie."""

from __future__ import annotations

import itertools
import random

import pytest

from sglang_qspec.trie import Insertion, RequestTrie, Source, TrieLimits
from sglang_qspec.trie._native import STREAM_TOKENS

LIMITS = TrieLimits(vocab_size=1000)


def test_a_draft_token_takes_little_memory() -> None:
    draw = random.Random(3)
    for tokens in (256, 2048, 16000):
        trie = RequestTrie(list(range(200)), LIMITS)
        before = trie.bytes
        for number in range(8):
            trie.insert(Source.QUEUE, number, 0, 0, draw.choices(range(500), k=tokens // 8))
        assert (trie.bytes - before) / trie.draft_size <= 48


def fill(size: int) -> tuple[int, int]:
    """Fill a request to its cap with streams of `size` new tokens; returns tokens, bytes."""
    trie = RequestTrie([1], TrieLimits(vocab_size=1 << 20))
    empty, tokens = trie.bytes, itertools.count()
    inserted = 0
    for number in itertools.count():
        token_ids = list(itertools.islice(tokens, size))
        if trie.insert(Source.QUEUE, number, 0, 0, token_ids) is not Insertion.ADDED:
            break
        inserted += size
    trie.check_integrity()
    assert trie.draft_size <= TrieLimits(vocab_size=1).max_request_tokens
    return inserted, trie.bytes - empty


def test_one_long_stream_takes_at_most_50_bytes_a_token_and_single_tokens_at_most_220() -> None:
    tokens, taken = fill(16_000)
    assert taken / tokens <= 50
    tokens, taken = fill(1)
    assert tokens == 16384 // (1 + STREAM_TOKENS)
    assert taken / tokens <= 220


@pytest.mark.parametrize("size", [1, 2, 5, 7, 8, 9, 16, 17, 24, 33, 100, 1000, 16_000])
def test_a_request_at_its_cap_takes_at_most_a_megabyte_of_drafts(size: int) -> None:
    assert fill(size)[1] <= 64 * 16384


def test_the_record_of_dropped_streams_stays_within_the_memory_cap() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000))
    for step in range(20):
        for number in range(3000):
            trie.insert(Source.STEP, 3000 * step + number, step, 0, [4])
        trie.commit([5])
        assert trie.bytes <= 64 * 16384
    trie.check_integrity()


def test_memory_stays_bounded_under_a_flood_of_short_drafts() -> None:
    trie = RequestTrie([1, 2, 3], TrieLimits(vocab_size=1000, max_request_tokens=64))
    sizes = []
    for step in range(60):
        for number in range(100):
            trie.insert(Source.STEP, 100 * step + number, step, 0, [4 + number])
        trie.commit([4])
        trie.check_integrity()
        assert trie.draft_size <= 64
        sizes.append(trie.bytes)
    assert sizes[-1] < 1.5 * sizes[10]
