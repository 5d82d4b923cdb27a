"""One request's trie: what it proposes, what it refuses, and what it forgets."""

from __future__ import annotations

import itertools
import random

import pytest

from sglang_qspec.trie import DraftTree, Insertion, RequestTrie, Source, TrieLimits, Trust
from sglang_qspec.trie._native import STREAM_TOKENS

LIMITS = TrieLimits(vocab_size=1000)


def accepted_path(tree: DraftTree, target: list[int]) -> list[int]:
    """Nodes that greedy verification accepts when the target goes on with `target`."""
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
    """Decode `target` with trees of `width`; tokens gained per pass."""
    return [len(sources) + 1 for sources in accepted_sources(trie, target, width)]


def accepted_sources(trie: RequestTrie, target: list[int], width: int) -> list[list[Source]]:
    """Decode `target` with trees of `width`; the sources of the accepted tokens of each pass."""
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


def test_seven_diverging_completions_hardly_distract_from_an_exact_greedy_one() -> None:
    draw = random.Random(1)
    target = draw.choices(range(1000), k=128)
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, target, greedy=True)
    for number in range(1, 8):
        other = [token if draw.random() < 0.9 else draw.randrange(1000) for token in target]
        trie.insert(Source.QUEUE, number, 0, 0, other)
    gained = serve(trie, target, 8)
    assert sum(gained) / len(gained) > 6.5


def test_the_request_finds_its_way_back_into_a_completion() -> None:
    draft = list(range(100, 140))
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, draft, greedy=True)
    trie.commit([100, 101, 102, 777, 778, 779])
    assert len(trie.propose(8)) == 1
    trie.commit([110, 111])
    tree = trie.propose(8)
    assert tree.token_ids == (111, *range(112, 119))
    assert set(tree.sources[1:]) == {Source.QUEUE}


def test_one_token_is_enough_to_come_back_where_nothing_better_matches() -> None:
    trie = RequestTrie([1, 2, 3], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [10, 11, 12, 13], greedy=True)
    trie.commit([99, 12])
    assert trie.propose(2).token_ids == (12, 13)


def test_a_single_token_is_looked_for_in_all_streams() -> None:
    trie = RequestTrie([1, 2, 3], LIMITS)
    for number, draft in enumerate([[10, 11, 12], [20, 11, 22], [30, 11, 32]]):
        trie.insert(Source.QUEUE, number, 0, 0, draft)
    trie.commit([99, 11])
    assert set(trie.propose(8).token_ids) == {11, 12, 22, 32}


def test_a_hopeless_token_is_not_proposed() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000, min_score=0.1))
    trie.insert(Source.QUEUE, 0, 0, 0, [10], greedy=True)
    for number in range(1, 12):
        trie.insert(Source.QUEUE, number, 0, 0, [20 if number == 1 else 10])
    assert trie.propose(8).token_ids == (1, 10)


def test_the_longer_match_wins() -> None:
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


def test_a_completion_that_continues_output_starts_at_its_base() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.commit([2, 3])
    assert not trie.insert(Source.QUEUE, 0, 2, 0, [40, 41, 42]).refused
    assert trie.propose(4).token_ids == (3, 40, 41, 42)
    assert not trie.insert(Source.QUEUE, 1, 1, 0, [3, 50, 51]).refused
    assert set(trie.propose(8).token_ids) == {3, 40, 41, 42, 50, 51}
    trie.insert(Source.QUEUE, 2, 1, 0, [7, 60, 61])
    assert 60 not in trie.propose(20).token_ids


def test_a_stream_that_lags_behind_the_output_is_followed_again_when_it_catches_up() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [10, 11], greedy=True)
    trie.commit([10, 11, 12, 13])
    assert len(trie.propose(8)) == 1
    trie.insert(Source.QUEUE, 0, 0, 2, [12], greedy=True)
    assert len(trie.propose(8)) == 1
    trie.insert(Source.QUEUE, 0, 0, 3, [13, 14, 15], greedy=True)
    assert trie.propose(8).token_ids == (13, 14, 15)


def test_prompt_and_output_are_looked_up_and_told_apart() -> None:
    trie = RequestTrie([5, 6, 7, 8], LIMITS)
    trie.commit([5, 6])
    tree = trie.propose(3)
    assert tree.token_ids == (6, 7, 8)
    assert tree.sources[1:] == (Source.PROMPT, Source.PROMPT)
    trie.commit([20, 21, 22, 20, 21])
    tree = trie.propose(2)
    assert tree.token_ids == (21, 22)
    assert tree.sources[1] is Source.OUTPUT


def test_a_guess_may_continue_the_prompt_or_be_met_later() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.GUESS, 0, 0, 0, [10, 11, 12, 13])
    assert trie.propose(3).token_ids[1:] == (10, 11)
    trie.commit([50, 51, 11, 12])
    tree = trie.propose(2)
    assert tree.token_ids == (12, 13)
    assert tree.sources[1] is Source.GUESS


def test_a_token_of_several_sources_counts_for_the_heaviest() -> None:
    trie = RequestTrie([1, 10, 1], LIMITS)
    trie.insert(Source.GUESS, 0, 0, 0, [10])
    trie.insert(Source.QUEUE, 0, 0, 0, [10], greedy=True)
    assert trie.propose(2).sources[1] is Source.QUEUE


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


def test_over_the_cap_streams_that_lost_track_go_first() -> None:
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


def test_making_room_does_not_lose_the_place_in_what_stays() -> None:
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


def test_a_stream_that_was_found_again_outlives_one_that_was_not() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000, max_request_tokens=100))
    trie.insert(Source.QUEUE, 0, 0, 0, list(range(200, 220)))
    trie.insert(Source.QUEUE, 1, 0, 0, list(range(300, 340)))
    trie.commit([7, 205, 206])
    assert trie.insert(Source.QUEUE, 2, 3, 0, [*range(400, 440)]) is Insertion.ADDED
    assert 207 in trie.propose(20).token_ids
    assert trie.insert(Source.QUEUE, 1, 0, 40, [340]) is Insertion.EVICTED


def test_a_completion_is_trusted_more_the_longer_it_has_been_right() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, list(range(100, 130)))
    fresh = trie.propose(2).scores[1]
    trie.commit(list(range(100, 110)))
    assert trie.propose(2).scores[1] > fresh


def test_a_long_output_is_forgotten_from_its_beginning() -> None:
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


def test_an_evicted_request_goes_on_without_its_drafts() -> None:
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


def test_a_text_of_one_token_over_and_over_stays_within_the_caps() -> None:
    trie = RequestTrie([4] * 500, LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, [4] * 500)
    for _ in range(50):
        trie.commit([4, 4, 4])
    trie.check_integrity()
    assert trie.propose(8).token_ids == (4,) * 8


def test_a_source_that_is_switched_off_is_not_proposed() -> None:
    trie = RequestTrie([5, 6, 7], LIMITS, sources={Source.QUEUE, Source.OUTPUT})
    trie.insert(Source.GUESS, 0, 0, 0, [10])
    trie.insert(Source.QUEUE, 0, 0, 0, [11])
    assert trie.propose(8).token_ids == (7, 11)
    trie.commit([5, 6])
    assert trie.propose(8).token_ids == (6,)
    trie.commit([5, 6])
    assert trie.propose(8).token_ids == (6, 5, 6)


def test_what_is_learnt_of_a_source_changes_what_is_proposed_first() -> None:
    trust = Trust(LIMITS.max_match)
    for number in range(40):
        earlier = RequestTrie([1], LIMITS, trust=trust)
        earlier.insert(Source.QUEUE, 0, 0, 0, [10, 11], greedy=True)
        earlier.insert(Source.GUESS, 0, 0, 0, [20, 21])
        first = earlier.propose(3).token_ids[1]
        assert first == (10 if number < 10 else first)
        earlier.commit([20, 21])
    trie = RequestTrie([1], LIMITS, trust=trust)
    trie.insert(Source.QUEUE, 0, 0, 0, [10, 11], greedy=True)
    trie.insert(Source.GUESS, 0, 0, 0, [20, 21])
    assert trie.propose(2).token_ids == (1, 20)


def guessing(trust: Trust, wrong: int) -> RequestTrie:
    """A request whose guess has been wrong so often, and proposes one token behind its text."""
    trie = RequestTrie([1], LIMITS, trust=trust, sources=[Source.GUESS])
    trie.insert(Source.GUESS, 0, 0, 0, [9, 2, 3] * 60)
    for _ in range(wrong):
        trie.commit([9, 2, 4])
    trie.commit([9, 2])
    return trie


def test_a_request_whose_drafts_are_wrong_is_trusted_less_than_others() -> None:
    trust = Trust(LIMITS.max_match)
    before = guessing(trust, 0).propose(2).scores[1]
    misled, other = guessing(trust, 12), guessing(trust, 0)
    assert misled.propose(2).scores[1] < 0.8 * other.propose(2).scores[1]
    assert other.propose(2).scores[1] < before


def test_guesses_that_agree_say_no_more_than_one_of_them() -> None:
    alone, many = (RequestTrie([1], LIMITS) for _ in range(2))
    alone.insert(Source.GUESS, 0, 0, 0, [5, 6])
    for number in range(8):
        many.insert(Source.GUESS, number, 0, 0, [5, 6])
    assert many.propose(3).scores == alone.propose(3).scores
    many.insert(Source.QUEUE, 0, 0, 0, [5, 6])
    assert many.propose(3).scores[1] > alone.propose(3).scores[1]


@pytest.mark.parametrize("policy", [1, 2], ids=["frequency", "recency"])
def test_streams_are_counted_together_among_many_branches(policy: int) -> None:
    """More different next tokens than are searched one by one: each still has one branch."""
    trie = RequestTrie([1], LIMITS)
    tokens = [*range(10, 60), 12, 55, 55, 40]
    for number, token in enumerate(tokens):
        trie.insert(Source.QUEUE, number, 0, 0, [token, token + 100])
    tree = trie.propose(2 * 50 + 1, policy)
    first = [
        token
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True)
        if not parent
    ]
    assert len(set(first)) == len(first)
    assert first[:3] == ([55, 12, 40] if policy == 1 else [40, 55, 12])


def test_a_draft_token_takes_little_memory() -> None:
    draw = random.Random(3)
    for tokens in (256, 2048, 16000):
        trie = RequestTrie(list(range(200)), LIMITS)
        before = trie.bytes
        for number in range(8):
            trie.insert(Source.QUEUE, number, 0, 0, draw.choices(range(500), k=tokens // 8))
        assert (trie.bytes - before) / trie.draft_size <= 48


def fill(size: int) -> tuple[int, int]:
    """Tokens in an empty request, and their bytes, when streams of `size` tokens, all different,
    have filled it to its cap."""
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


def test_what_is_remembered_of_dropped_streams_takes_no_more_than_the_streams_did() -> None:
    trie = RequestTrie([1], TrieLimits(vocab_size=1000))
    for step in range(20):
        for number in range(3000):
            trie.insert(Source.STEP, 3000 * step + number, step, 0, [4])
        trie.commit([5])
        assert trie.bytes <= 64 * 16384
    trie.check_integrity()


def test_a_flood_of_short_drafts_stays_in_bounds_for_as_long_as_the_request_lives() -> None:
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


def test_drafts_that_the_output_has_outrun_make_room_for_others() -> None:
    trie = RequestTrie([1, 2, 3], TrieLimits(vocab_size=1000, max_request_tokens=64))
    for number in range(64 // (STREAM_TOKENS + 1)):
        assert trie.insert(Source.STEP, number, 0, 0, [4]) is Insertion.ADDED
    assert trie.insert(Source.STEP, 32, 0, 0, [4]) is Insertion.FULL
    trie.commit([4, 5])
    assert trie.insert(Source.STEP, 33, 2, 0, [6, 7]) is Insertion.ADDED
    trie.check_integrity()
    assert trie.propose(4).token_ids == (5, 6, 7)
