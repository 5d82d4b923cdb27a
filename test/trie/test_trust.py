"""How a source's earlier accuracy changes the scores of its drafts."""

from __future__ import annotations

from sglang_qspec.trie import RequestTrie, Source, TrieLimits, Trust

LIMITS = TrieLimits(vocab_size=1000)


def test_trust_in_a_completion_grows_while_it_is_right() -> None:
    trie = RequestTrie([1], LIMITS)
    trie.insert(Source.QUEUE, 0, 0, 0, list(range(100, 130)))
    fresh = trie.propose(2).scores[1]
    trie.commit(list(range(100, 110)))
    assert trie.propose(2).scores[1] > fresh


def test_trust_in_a_source_changes_the_first_proposal() -> None:
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
    """A request with a guess that was wrong `wrong` times and now proposes a token."""
    trie = RequestTrie([1], LIMITS, trust=trust, sources=[Source.GUESS])
    trie.insert(Source.GUESS, 0, 0, 0, [9, 2, 3] * 60)
    for _ in range(wrong):
        trie.commit([9, 2, 4])
    trie.commit([9, 2])
    return trie


def test_wrong_drafts_lower_the_scores_of_their_request_most() -> None:
    trust = Trust(LIMITS.max_match)
    before = guessing(trust, 0).propose(2).scores[1]
    misled, other = guessing(trust, 12), guessing(trust, 0)
    assert misled.propose(2).scores[1] < 0.8 * other.propose(2).scores[1]
    assert other.propose(2).scores[1] < before


def test_agreeing_guesses_score_like_a_single_one() -> None:
    alone, many = (RequestTrie([1], LIMITS) for _ in range(2))
    alone.insert(Source.GUESS, 0, 0, 0, [5, 6])
    for number in range(8):
        many.insert(Source.GUESS, number, 0, 0, [5, 6])
    assert many.propose(3).scores == alone.propose(3).scores
    many.insert(Source.QUEUE, 0, 0, 0, [5, 6])
    assert many.propose(3).scores[1] > alone.propose(3).scores[1]
