"""Second choices of a drafter become leaves beside its first ones."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from sglang_qspec.trie import Insertion, RequestTrie, Source, TrieLimits, Trust

LIMITS = TrieLimits(vocab_size=1000)
FIRST, SECOND = [5, 6, 7], [15, 16, 17]


def drafted(
    trust: Trust | None = None, *, sources: Collection[Source] = tuple(Source)
) -> RequestTrie:
    """A request with a step draft and its second choices."""
    trie = RequestTrie([1], LIMITS, trust=trust, sources=sources)
    assert trie.insert(Source.STEP, 1, 0, 0, FIRST, second_ids=SECOND) is Insertion.ADDED
    return trie


def learnt(right: int, wrong: int) -> Trust:
    """What was learnt from drafts that were wrong, by their second choices, at each position."""
    trust = Trust(LIMITS.max_match)
    for number in range(right + wrong):
        for depth, second in enumerate(SECOND):
            drafted(trust).commit([*FIRST[:depth], second if number < right else 99])
    return trust


def test_a_second_choice_is_a_leaf_that_takes_a_share_of_what_the_first_leaves() -> None:
    tree = drafted().propose(8)
    assert tree.token_ids == (1, 5, 6, 7, 15)
    assert tree.parents == (0, 0, 1, 2, 0)
    assert tree.sources[1:] == (Source.STEP,) * 3 + (Source.SECOND,)
    assert tree.scores[4] == pytest.approx(0.35 * (1.0 - tree.scores[1]))


def test_deeper_second_choices_come_once_first_ones_are_often_wrong() -> None:
    trie = drafted(learnt(300, 300))
    assert set(SECOND) <= set(trie.propose(8).token_ids)
    trie.commit([5])
    tree = trie.propose(8)
    assert set(tree.token_ids) == {5, 6, 7, 16, 17}
    for first, second in ((6, 16), (7, 17)):
        places = [tree.token_ids.index(token) for token in (first, second)]
        assert tree.parents[places[0]] == tree.parents[places[1]]
    tree.check_integrity()


def test_the_share_follows_how_often_second_choices_were_right() -> None:
    shares = []
    for trust in (learnt(100, 0), learnt(0, 20)):
        tree = drafted(trust).propose(8)
        shares.append(tree.scores[tree.token_ids.index(15)] / (1.0 - tree.scores[1]))
    assert shares[0] > 0.7
    assert shares[1] < 0.3


def test_a_token_that_a_stream_proposes_is_no_second_choice() -> None:
    trie = drafted()
    trie.insert(Source.GUESS, 1, 0, 0, [15, 8])
    tree = trie.propose(8)
    assert tree.token_ids.count(15) == 1
    assert tree.sources[tree.token_ids.index(15)] is Source.GUESS


def test_a_paused_or_unwanted_source_has_no_second_choices() -> None:
    assert drafted(sources=[Source.STEP]).propose(8).token_ids == (1, 5, 6, 7)
    assert drafted(sources=[Source.SECOND]).propose(8).token_ids == (1,)


def test_a_draft_that_the_output_left_has_no_second_choices_any_more() -> None:
    trie = drafted(learnt(300, 300))
    trie.commit([9, 5])
    assert trie.propose(8).sources[1:] == (Source.STEP,) * 2


def test_chunks_add_second_choices_and_evictions_keep_those_of_followed_drafts() -> None:
    limits = TrieLimits(vocab_size=1000, max_request_tokens=64)
    trie = RequestTrie([1], limits, trust=learnt(300, 300))
    trie.insert(Source.STEP, 1, 0, 0, [5], second_ids=[15])
    trie.insert(Source.STEP, 1, 0, 0, FIRST, second_ids=SECOND)
    trie.insert(Source.QUEUE, 1, 0, 0, list(range(100, 140)))
    trie.commit([5])
    assert trie.insert(Source.QUEUE, 2, 1, 0, list(range(200, 230))) is Insertion.ADDED
    trie.check_integrity()
    assert {16, 17} <= set(trie.propose(8).token_ids)


def test_a_wrong_number_or_a_token_outside_the_vocabulary_is_refused() -> None:
    trie = RequestTrie([1], LIMITS)
    with pytest.raises(ValueError, match="there are 1 second_ids, but 3 token_ids"):
        trie.insert(Source.STEP, 1, 0, 0, FIRST, second_ids=[15])
    for token in (-1, 1000):
        found = trie.insert(Source.STEP, 1, 0, 0, FIRST, second_ids=[15, 16, token])
        assert found is Insertion.BAD_TOKEN
    assert trie.draft_size == 0
    with pytest.raises(ValueError, match="source is SECOND"):
        trie.insert(Source.SECOND, 1, 0, 0, FIRST)
