"""Matching, compared with a naive reference that searches all texts at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_qspec.trie import DraftTree, RequestTrie, Source, TrieLimits, Trust

Path = tuple[int, ...]

GENEROUS = TrieLimits(vocab_size=10, max_cursors=10_000, max_scan=10_000, min_score=1e-300)
"""Limits that no test below reaches."""

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), tokens),
        st.tuples(st.just("insert"), st.integers(0, 3), tokens),
    ),
    max_size=14,
)


@dataclass
class NaiveRequest:
    """The tokens that a request's trie should propose, by definition."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    streams: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def followed(self) -> list[list[int]]:
        """For each stream that agrees with the whole committed output, the stream's next tokens."""
        remains = []
        for base_len, draft in self.streams.values():
            committed = self.output[base_len:]
            if draft[: len(committed)] == committed:
                remains.append(draft[len(committed) :])
        return remains

    def after(self, size: int) -> list[list[int]]:
        """The tokens after each occurrence of the last `size` output tokens, in all texts."""
        text = self.prompt + self.output
        tail = text[-size:]
        remains = []
        if len(tail) == size:
            for base_len, draft in self.streams.values():
                context = text[len(self.prompt) + base_len - 1]
                remains += _after(tail, [context, *draft], first_end=max(size, 2))
            remains += [rest for rest in _after(tail, text, first_end=size) if rest]
        return remains


def _after(tail: list[int], text: list[int], first_end: int) -> list[list[int]]:
    size = len(tail)
    return [text[end:] for end in range(first_end, len(text) + 1) if text[end - size : end] == tail]


def _prefixes(texts: list[list[int]]) -> set[Path]:
    return {tuple(text[:size]) for text in texts for size in range(1, len(text) + 1)}


def _scores(tree: DraftTree) -> dict[Path, float]:
    paths: list[Path] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.token_ids[node]))
    return dict(zip(paths[1:], tree.scores[1:], strict=True))


def _paths(tree: DraftTree) -> set[Path]:
    return set(_scores(tree))


def _run(
    prompt: list[int], script: list[tuple[Any, ...]], limits: TrieLimits
) -> Iterator[tuple[RequestTrie, NaiveRequest]]:
    """The trie and its reference after each step of the script."""
    trie, naive = RequestTrie(prompt, limits), NaiveRequest(list(prompt))
    for step in script:
        if step[0] == "commit":
            trie.commit(step[1])
            naive.output += step[1]
        else:
            _, number, token_ids = step
            base_len, draft = naive.streams.setdefault(number, (len(naive.output), []))
            result = trie.insert(Source.QUEUE, number, base_len, len(draft), token_ids)
            assert not result.refused
            draft += token_ids
        trie.check_integrity()
        yield trie, naive


@settings(max_examples=400)
@given(prompt=tokens, script=steps)
def test_the_whole_tree_holds_what_follows_every_occurrence_of_the_last_two_tokens(
    prompt: list[int], script: list[tuple[Any, ...]]
) -> None:
    for trie, naive in _run(prompt, script, GENEROUS):
        tree = trie.propose(100_000)
        tree.check_integrity()
        assert tree.token_ids[0] == (naive.prompt + naive.output)[-1]
        followed, pairs = _prefixes(naive.followed()), _prefixes(naive.after(2))
        if naive.after(2):
            assert _paths(tree) == followed | pairs
        else:
            assert followed <= _paths(tree) <= followed | _prefixes(naive.after(1))


@settings(max_examples=200)
@given(prompt=tokens, script=steps, width=st.integers(1, 9))
def test_small_caps_give_a_part_of_the_whole_tree_within_the_width(
    prompt: list[int], script: list[tuple[Any, ...]], width: int
) -> None:
    capped = TrieLimits(vocab_size=10, max_cursors=2, max_scan=1, max_match=3, min_score=1e-3)
    for trie, naive in _run(prompt, script, capped):
        tree = trie.propose(width)
        tree.check_integrity()
        assert len(tree) <= width
        texts = naive.followed() + naive.after(2) + naive.after(1)
        assert _paths(tree) <= _prefixes(texts)


@settings(max_examples=400)
@given(prompt=tokens, script=steps, most=st.integers(2, 40))
def test_the_longest_match_is_the_longest_that_has_a_next_token(
    prompt: list[int], script: list[tuple[Any, ...]], most: int
) -> None:
    limits = replace(GENEROUS, max_match=most)
    for trie, naive in _run(prompt, script, limits):
        followed = [
            1 + len(naive.output) - base_len
            for base_len, draft in naive.streams.values()
            if draft[: len(naive.output) - base_len] == naive.output[base_len:]
            and len(draft) > len(naive.output) - base_len
        ]
        sizes = range(2, len(naive.prompt + naive.output) + 1)
        longest = max([0, *followed, *(size for size in sizes if any(naive.after(size)))])
        # A single token is searched only if its pair with the token before it occurs nowhere.
        assert trie.longest_match() in {min(longest or 1, most), min(longest, most)}
        assert (trie.longest_match() > 0) == (len(trie.propose(100_000)) > 1)
        assert trie.longest_match(paused=list(Source)) == 0


@settings(max_examples=100)
@given(
    prompt=tokens,
    draft=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_a_late_completion_gives_the_scores_of_an_early_one(
    prompt: list[int], draft: list[int], output: list[int], cuts: list[int]
) -> None:
    early, late = (
        RequestTrie(prompt, GENEROUS, trust=Trust(GENEROUS.max_match, learns=False))
        for _ in range(2)
    )
    early.insert(Source.QUEUE, 0, 0, 0, draft)
    edges = sorted({0, *(min(cut, len(output)) for cut in cuts), len(output)})
    for begin, end in pairwise(edges):
        early.commit(output[begin:end])
    late.commit(output)
    late.insert(Source.QUEUE, 0, 0, 0, draft)
    if NaiveRequest(prompt, output, {0: (0, draft)}).after(2):
        scores = _scores(early.propose(10_000))
        assert _scores(late.propose(10_000)) == pytest.approx(scores)
