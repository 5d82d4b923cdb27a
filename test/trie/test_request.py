"""The trees that one request's trie proposes."""

from __future__ import annotations

import random

import pytest

from sglang_qspec.trie import DraftTree, DraftTrees, RequestTrie, Source, TrieLimits
from sglang_qspec.trie._native import propose

LIMITS = TrieLimits(vocab_size=1000)


def accepted_path(tree: DraftTree, target: list[int]) -> list[int]:
    """Nodes that greedy verification accepts if the target continues with `target`."""
    path, node = [], 0
    for token in target:
        children = [
            child
            for child in range(1, len(tree))
            if tree.parents[child] == node and tree.token_ids[child] == token
        ]
        if not children:
            break
        node = children[0]
        path.append(node)
    return path


def serve(trie: RequestTrie, target: list[int], width: int) -> list[int]:
    """Decode `target` with trees of `width`; returns the tokens of each pass."""
    return [len(sources) + 1 for sources in accepted_sources(trie, target, width)]


def accepted_sources(trie: RequestTrie, target: list[int], width: int) -> list[list[Source]]:
    """Decode `target` with trees of `width`; returns the accepted tokens' sources, by pass."""
    passes, done = [], trie.output_len
    while done < len(target):
        tree = trie.propose(width)
        tree.check_integrity()
        path = accepted_path(tree, target[done:])
        step = target[done : done + len(path) + 1]
        trie.commit(step)
        trie.check_integrity()
        passes.append([tree.sources[node] for node in path])
        done += len(step)
    return passes


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_a_greedy_completion_equal_to_the_output_fills_every_pass(width: int) -> None:
    target = random.Random(0).choices(range(1000), k=16 * 12)
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, target, greedy=True)
    passes = accepted_sources(trie, target, width)
    assert passes == [[Source.QUEUE] * (width - 1)] * (len(target) // width)


def test_diverging_completions_hardly_lower_the_accept_length_of_an_exact_greedy_one() -> None:
    draw = random.Random(1)
    target = draw.choices(range(1000), k=128)
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, target, greedy=True)
    for number in range(1, 8):
        other = [token if draw.random() < 0.9 else draw.randrange(1000) for token in target]
        trie.insert(Source.QUEUE, number, 0, 0, other)
    gained = serve(trie, target, 8)
    assert sum(gained) / len(gained) > 6.5


def test_a_diverged_request_matches_its_completion_again() -> None:
    draft = list(range(100, 140))
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, draft, greedy=True)
    trie.commit([100, 101, 102, 777, 778, 779])
    assert len(trie.propose(8)) == 1
    trie.commit([110, 111])
    tree = trie.propose(8)
    assert tree.token_ids == (111, *range(112, 119))
    assert set(tree.sources[1:]) == {Source.QUEUE}


def test_one_token_is_enough_to_match_again_without_a_longer_match() -> None:
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [10, 11, 12, 13], greedy=True)
    trie.commit([99, 12])
    assert trie.propose(2).token_ids == (12, 13)


def test_a_single_token_is_matched_in_all_streams() -> None:
    trie = RequestTrie([1, 2, 3], LIMITS)
    for number, draft in enumerate([[10, 11, 12], [20, 11, 22], [30, 11, 32]]):
        trie.insert(Source.QUEUE, number, 0, 0, draft)
    trie.commit([99, 11])
    assert set(trie.propose(8).token_ids) == {11, 12, 22, 32}


def test_a_token_below_the_minimum_score_is_not_proposed() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000, min_score=0.1))
    trie.insert(Source.QUEUE, 0, 0, 0, [10], greedy=True)
    for number in range(1, 12):
        trie.insert(Source.QUEUE, number, 0, 0, [20 if number == 1 else 10])
    assert trie.propose(8).token_ids == (1, 10)


def test_the_continuation_of_the_longer_match_wins() -> None:
    trie = RequestTrie([8, 7, 6, 5, 1, 2, 3, 4, 50, 9, 9, 3, 4, 60, 9], LIMITS)
    trie.commit([8, 7, 6, 5, 1, 2, 3, 4])
    assert trie.propose(3).token_ids[1] == 50


def test_of_equal_matches_the_more_frequent_continuation_wins() -> None:
    trie = RequestTrie([3, 4, 60, 9, 3, 4, 60, 7, 3, 4, 50, 8], LIMITS)
    trie.commit([3, 4])
    assert trie.propose(3).token_ids[1] == 60


def test_agreeing_completions_outweigh_a_single_one() -> None:
    trie = RequestTrie([1], LIMITS)
    for number, token in enumerate([20, 30, 30, 30]):
        trie.insert(Source.QUEUE, number, 0, 0, [token, 5])
    tree = trie.propose(5)
    assert tree.token_ids[1] == 30
    assert 20 in tree.token_ids
    assert tree.scores[1] > 2 * tree.scores[tree.token_ids.index(20)]


def test_prompt_and_output_lookups_are_separate_sources() -> None:
    trie = RequestTrie([5, 6, 7, 8], LIMITS)
    trie.commit([5, 6])
    tree = trie.propose(3)
    assert tree.token_ids == (6, 7, 8)
    assert tree.sources[1:] == (Source.PROMPT, Source.PROMPT)
    trie.commit([20, 21, 22, 20, 21])
    tree = trie.propose(2)
    assert tree.token_ids == (21, 22)
    assert tree.sources[1] is Source.OUTPUT


def test_a_guess_may_continue_the_prompt_or_match_later() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.GUESS, 0, 0, 0, [10, 11, 12, 13])
    assert trie.propose(3).token_ids[1:] == (10, 11)
    trie.commit([50, 51, 11, 12])
    tree = trie.propose(2)
    assert tree.token_ids == (12, 13)
    assert tree.sources[1] is Source.GUESS


def test_a_token_of_several_sources_belongs_to_the_highest_scored() -> None:
    trie = RequestTrie([1, 10, 1], LIMITS)
    trie.insert(Source.GUESS, 0, 0, 0, [10])
    trie.insert(Source.QUEUE, 0, 0, 0, [10], greedy=True)
    assert trie.propose(2).sources[1] is Source.QUEUE


def test_equal_tokens_of_many_streams_share_one_branch() -> None:
    """With many distinct next tokens the trie does not search linearly; each has one branch."""
    trie = RequestTrie([1], LIMITS)
    tokens = [*range(10, 60), 12, 55, 55, 40]
    for number, token in enumerate(tokens):
        trie.insert(Source.QUEUE, number, 0, 0, [token, token + 100])
    tree = DraftTrees(*propose([trie], [1], 2 * 50 + 1, 0.0))[0]
    first = [
        token
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True)
        if not parent
    ]
    assert len(set(first)) == len(first)
    assert first[:3] == [55, 12, 40]


def test_ids_outside_the_vocabulary_are_never_proposed() -> None:
    trie = RequestTrie([5, 6, 2_000_000_000_000, 5, 6], LIMITS)
    trie.commit([5, 6])
    assert trie.propose(8).token_ids == (6, 5, 6)
    image_last = RequestTrie([5, 6, 1 << 40], LIMITS)
    assert image_last.propose(8).token_ids == (0,)
    image_last.insert(Source.QUEUE, 0, 0, 0, [9])
    assert image_last.propose(8).token_ids == (0, 9)


def test_an_empty_prompt_is_no_error() -> None:
    trie = RequestTrie([], LIMITS)
    assert len(trie.propose(8)) == 1
    trie.insert(Source.QUEUE, 0, 0, 0, [9, 8])
    trie.commit([9])
    assert trie.propose(8).token_ids == (9, 8)
    trie.check_integrity()


def test_a_text_of_one_repeated_token_stays_within_the_caps() -> None:
    trie = RequestTrie([4] * 500, LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [4] * 500)
    for _ in range(50):
        trie.commit([4, 4, 4])
    trie.check_integrity()
    assert trie.propose(8).token_ids == (4,) * 8


def test_a_source_that_is_off_is_not_proposed() -> None:
    trie = RequestTrie([5, 6, 7], LIMITS, sources={Source.QUEUE, Source.OUTPUT})
    trie.insert(Source.GUESS, 0, 0, 0, [10])
    trie.insert(Source.QUEUE, 0, 0, 0, [11])
    assert trie.propose(8).token_ids == (7, 11)
    trie.commit([5, 6])
    assert trie.propose(8).token_ids == (6,)
    trie.commit([5, 6])
    assert trie.propose(8).token_ids == (6, 5, 6)
