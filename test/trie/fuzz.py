"""Fuzzes the tries with random operations, valid and invalid; the invariants must hold after them.

    python -m test.trie.fuzz --operations 20000 --seed 1

The command prints the number of operations, or the exception of the first operation that failed.
All arguments derive from the seed, so a failure is reproducible. `scripts/sanitize` runs the
command on a build with sanitizers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from sglang_qspec.trie import DraftTrees, RequestTrie, Source, TrieLimits, TrieStore, Trust
from sglang_qspec.trie._native import (
    Trie,
    count_by_position,
    count_by_source,
    lay_out,
    propose,
)

LIMITS = TrieLimits(
    vocab_size=40,
    max_request_tokens=300,
    max_lookup_tokens=64,
    max_total_tokens=1500,
    max_match=6,
    max_cursors=5,
    max_scan=4,
)
RIDS = ("a", "b", "c", "d", "e", "f")
EXTREMES = (-(1 << 80), -(1 << 31), -1, 0, 1, 39, 40, (1 << 31) - 1, 1 << 31, 1 << 63, 1 << 80)
REFUSED = (ValueError, TypeError, IndexError, OverflowError, MemoryError)
"""Allowed exceptions for invalid arguments; only numpy raises IndexError and MemoryError."""
MOST_BYTES = 64 * (300 + 64 + 1000) + 8192
"""Maximum bytes of one request within `LIMITS`, with the longest output of this test."""


class TrieFuzz:
    """A store of requests under random operations."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = TrieStore(LIMITS)
        self.operations = 0
        self._actions: list[tuple[int, Callable[[], None]]] = [
            (3, self.open),
            (1, self.close),
            (30, self.insert),
            (10, self.insert_anything),
            (12, self.commit),
            (2, self.commit_anything),
            (10, self.propose),
            (4, self.propose_anything),
            (1, self.evict),
            (6, self.lay_out),
            (6, self.lay_out_anything),
            (4, self.count_anything),
            (1, self.make_anything),
        ]

    def run(self, operations: int) -> None:
        """Run this number of random operations; raises the first failure."""
        weights = [weight for weight, _ in self._actions]
        actions = [action for _, action in self._actions]
        for action in self.random.choices(actions, weights, k=operations):
            action()
            self.operations += 1
            if self.operations % 8 == 0:
                self.check()
        self.check()

    def check(self) -> None:
        """Check the invariants."""
        self.store.check_integrity()
        for rid in RIDS:
            trie = self.store.get(rid)
            if trie is not None:
                assert trie.draft_size <= LIMITS.max_request_tokens
                assert trie.bytes <= MOST_BYTES

    def trie(self) -> tuple[str, RequestTrie]:
        rid = self.random.choice(RIDS)
        return rid, self.store.get(rid) or self.store.open(rid, self.tokens(20))

    def tokens(self, most: int) -> list[int]:
        """At most `most` token ids with few distinct values, so that texts match."""
        kinds = self.random.choice((2, 5, LIMITS.vocab_size))
        return self.random.choices(range(kinds), k=self.random.randint(0, most))

    def anything(self) -> Any:
        return self.random.choice((*EXTREMES, None, "x", 1.5, self.random.randint(-3, 60)))

    def open(self) -> None:
        ids = self.tokens(200) + self.random.choice(([], [1 << 40], [-1], self.tokens(9)))
        sources = self.random.sample(list(Source), self.random.randint(0, len(Source)))
        width = self.random.choice((1, 2, 1 << 30))
        self.store.open(self.random.choice(RIDS), ids, sources=sources, max_width=width)

    def close(self) -> None:
        self.store.close(self.random.choice(RIDS))

    def insert(self) -> None:
        rid, trie = self.trie()
        source = self.random.choice((Source.QUEUE, Source.GUESS, Source.STEP))
        base_len = max(0, trie.output_len - self.random.choice((0, 0, 0, 1, 3, 30)))
        start = self.random.choice((0, 0, 0, 1, 5))
        stream_id = self.random.choice((0, 1, 2, self.random.randrange(1 << 62)))
        token_ids = self.tokens(self.random.choice((1, 4, 60)))
        greedy = self.random.random() < 0.3
        seconds = [(token + 1) % 7 for token in token_ids] if self.random.random() < 0.5 else []
        before = trie.size
        result = self.store.insert(
            rid,
            trie.serial,
            source,
            stream_id,
            base_len,
            start,
            token_ids,
            second_ids=seconds,
            greedy=greedy,
        )
        assert not result.refused or trie.size <= before

    def insert_anything(self) -> None:
        rid, trie = self.trie()
        token_ids: Any = self.random.choice(
            (self.tokens(4), [self.anything() for _ in range(3)], None, 7, "abc", b"ab", {3: 1})
        )
        stream_id, base_len, start = (self.anything() for _ in range(3))
        second_ids: Any = self.random.choice(([], token_ids, self.tokens(3)))
        with suppress(*REFUSED):
            if self.random.random() < 0.5:
                source = self.random.choice((Source.QUEUE, Source.STEP))
                self.store.insert(rid, trie.serial, source, stream_id, base_len, start, token_ids)
            else:
                before = trie.size
                Trie.insert_chunk(  # with any numbers, which `RequestTrie.insert` does not allow
                    trie,
                    self.anything(),
                    stream_id,
                    base_len,
                    start,
                    token_ids,
                    second_ids,
                    self.anything(),
                )
                self.store._size += trie.size - before

    def commit(self) -> None:
        rid, trie = self.trie()
        if trie.output_len > 1000:
            self.store.close(rid)
            return
        tree = trie.propose(6)
        follow = list(tree.token_ids[1 : self.random.randint(1, len(tree))])
        self.store.commit(rid, follow + self.tokens(self.random.choice((1, 3, 100))))

    def commit_anything(self) -> None:
        rid, trie = self.trie()
        bad: Any = self.random.choice(([-1], [LIMITS.vocab_size], [1 << 40], [1.5], None, ["x"], 5))
        size, output_len = trie.size, trie.output_len
        try:
            self.store.commit(rid, bad)
        except REFUSED:
            assert (trie.size, trie.output_len) == (size, output_len)
        else:
            raise AssertionError(f"{bad!r} was committed")

    def propose(self) -> None:
        rids = self.random.choices((*RIDS, None, "?"), k=self.random.randint(0, 5))
        tries = [self.store.get(rid) if rid else None for rid in rids]
        roots = [trie.last_token if trie else 3 for trie in tries]
        width = self.random.choice((1, 2, 3, 8, 33, 200))
        floor = self.random.choice((0.0, 1e-300, 0.02, 0.5, 1.0))
        trees = DraftTrees(*propose(tries, roots, width, floor))
        assert trees.width == width
        assert len(trees) == len(roots)
        for row, root in enumerate(roots):
            tree = trees[row]
            tree.check_integrity()
            assert tree.token_ids[0] == root
            assert all(0 <= token < LIMITS.vocab_size for token in tree.token_ids)
        paused = self.random.sample(list(Source), 2)
        part = self.store.propose(rids, roots, width, paused=paused)
        assert not sum(part.count_by_source()[source] for source in paused)
        matches = [trie.longest_match(paused) if trie else 0 for trie in tries]
        assert all(0 <= match <= LIMITS.max_match for match in matches)
        assert all(match or size == 1 for match, size in zip(matches, part.sizes, strict=True))

    def propose_anything(self) -> None:
        _, trie = self.trie()
        numbers = [self.anything() for _ in range(3)]
        if isinstance(numbers[0], int) and numbers[0] > 1 << 16:
            numbers[0] = 0  # large widths are allowed but slow
        with suppress(*REFUSED):
            propose([trie], self.random.choice(([1], [], [1, 2])), *numbers)

    def evict(self) -> None:
        rid, _ = self.trie()
        self.store._evict(rid)

    def lay_out(self) -> None:
        n, width = self.random.randint(0, 3), self.random.randint(1, 12)
        parents, sizes = self.parents(n, width), self.sizes(n, width)
        mask, depths, next_token, next_sibling = lay_out(parents, sizes)
        for row in range(n):
            linked = 0
            for node in range(width):
                assert mask[row, node].sum() == depths[row, node] + 1
                child = next_token[row, node]
                while child >= 0:
                    assert parents[row, child] == node
                    linked += 1
                    child = next_sibling[row, child]
            assert linked == sizes[row] - 1
        paths = [self.random.sample(range(size), self.random.randint(0, size)) for size in sizes]
        sources = self.integers(0, len(Source), (n, width), np.uint8)
        judged, accepted = (np.zeros((len(Source), 4), np.int64) for _ in range(2))
        count_by_position(parents, sources, sizes, paths, judged, accepted)
        assert (accepted <= judged).all()
        assert sum(count_by_source(sources, sizes)) == sum(sizes) - n

    def lay_out_anything(self) -> None:
        try:
            mask, *_ = lay_out(self.array(np.int32), self.array(np.int32))
        except REFUSED:
            return
        assert mask.shape[1:] == (mask.shape[1],) * 2

    def count_anything(self) -> None:
        n, width = self.random.randint(0, 3), self.random.randint(1, 6)
        arguments: list[Any] = [
            self.parents(n, width),
            self.integers(0, len(Source), (n, width), np.uint8),
            self.sizes(n, width),
            [[0]] * n,
            np.zeros((len(Source), 2), np.int64),
            np.zeros((len(Source), 2), np.int64),
        ]
        wrong = self.random.randrange(6)
        bad_paths = self.random.choice(([[-1]], [[width]], [[1 << 31]], None, [], [[0]] * 9))
        arguments[wrong] = bad_paths if wrong == 3 else self.array(arguments[wrong].dtype.type)
        with suppress(*REFUSED):
            count_by_source(arguments[1], arguments[2])
        try:
            count_by_position(*arguments)
        except REFUSED:
            assert wrong in (4, 5) or not arguments[4].any()

    def make_anything(self) -> None:
        """Create a Trust and a trie, usually with an invalid limit."""
        max_match = self.anything()
        try:
            trust: Any = Trust(max_match)
        except REFUSED:
            trust = self.random.choice((None, Trust(6)))
        limits = {
            "vocab_size": 40,
            "max_request_tokens": 50,
            "max_lookup_tokens": 64,
            "max_cursors": 4,
            "max_scan": 4,
            "max_width": 8,
        }
        limits[self.random.choice(list(limits))] = self.anything()
        prompt = self.random.choice((self.tokens(20), [self.anything()], [3] * 65))
        native: Any = Trie
        with suppress(*REFUSED):
            trie = native(prompt, 3, max_match=max_match, trust=trust, sources=31, **limits)
            trie.commit([1, 2, 1])
            trie.insert_chunk(0, 0, 0, 0, [1, 2, 3], False)
            trie.check_integrity()

    def parents(self, n: int, width: int) -> np.ndarray:
        rows = [[0, *(self.random.randrange(node) for node in range(1, width))] for _ in range(n)]
        return np.array(rows, np.int32).reshape(n, width)

    def sizes(self, n: int, width: int) -> np.ndarray:
        return self.integers(1, width + 1, (n,), np.int32)

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape))
        drawn = [self.random.randrange(low, high) for _ in range(count)]
        return np.array(drawn, dtype).reshape(shape)

    def array(self, dtype: Any) -> np.ndarray:
        """An array of any shape, usually of this type."""
        shape = tuple(self.random.randint(0, 4) for _ in range(self.random.randint(0, 3)))
        low = 0 if dtype is np.uint8 else -3
        array = self.integers(low, 7, shape, dtype)
        if self.random.random() < 0.1:
            array = array.astype(self.random.choice((np.float64, np.int64, np.int16)))
        if self.random.random() < 0.1:
            array = array.T
        return array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done = 0
    while done < options.operations:  # a new store every 5000 operations
        fuzz = TrieFuzz(options.seed + done)
        fuzz.run(min(5000, options.operations - done))
        done += fuzz.operations
    print(f"{done} operations")


if __name__ == "__main__":
    main()
