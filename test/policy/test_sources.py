"""Pauses of draft sources: conditions, lengths and log messages."""

import logging

import numpy as np
import pytest

from sglang_qspec.policy import FirstTokens, Sources
from sglang_qspec.policy.sources import (
    FEWEST_TOKENS,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    WARNING_INTERVAL_S,
)
from sglang_qspec.trie import DraftTree, DraftTrees, Source

GUESS, STEP = Source.GUESS, Source.STEP


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sources(clock: Clock) -> Sources:
    return Sources(clock)


def fail(sources: Sources, source: Source = GUESS, tokens: int = FEWEST_TOKENS) -> None:
    """Report enough tokens for a verdict, nine of ten wrong, with more cost than saving."""
    sources.observe(source, tokens, tokens // 10, saved=0.1, cost=0.2)


def test_a_source_that_is_seldom_right_and_costs_more_than_it_saves_is_paused(
    sources: Sources,
) -> None:
    sources.observe(GUESS, FEWEST_TOKENS - 1, FEWEST_TOKENS // 3, saved=0.1, cost=0.2)
    assert sources.paused == frozenset()
    sources.observe(GUESS, 1, 0)
    assert sources.paused == {GUESS}


def test_a_source_that_is_never_right_is_paused_sooner(sources: Sources) -> None:
    for _ in range(13):
        sources.observe(GUESS, 1, 0, cost=0.01)
    assert sources.paused == frozenset()
    sources.observe(GUESS, 1, 0, cost=0.01)
    assert sources.paused == {GUESS}


def test_the_tokens_of_a_tree_fail_together_and_count_as_one(sources: Sources) -> None:
    for _ in range(13):
        sources.observe(GUESS, 15, 0, cost=0.01, trees=1)
    assert sources.paused == frozenset()
    sources.observe(GUESS, 15, 0, cost=0.01, trees=1)
    assert sources.paused == {GUESS}


def test_a_pass_counts_the_trees_that_have_tokens_of_the_source(sources: Sources) -> None:
    tree = DraftTree((1, 2, 3, 4), (0, 0, 1, 2), (GUESS, GUESS, GUESS, STEP), (1.0, 0.9, 0.8, 0.7))
    trees = DraftTrees.of([tree, tree, tree], 6).cut(np.array([4, 3, 1]))
    for _ in range(6):
        sources.record(trees, [[], [], []], token_seconds=0.1, extra_seconds=0.1)
    assert sources.paused == frozenset()
    sources.record(trees, [[], [], []], token_seconds=0.1, extra_seconds=0.1)
    assert sources.paused == {GUESS}  # 14 trees; of the other source there are 7


@pytest.mark.parametrize(
    ("right", "saved", "cost"),
    [(0, 0.2, 0.1), (FEWEST_TOKENS // 2, 0.1, 0.2), (0, 0.0, 0.0)],
    ids=["saves more", "often right", "costs nothing"],
)
def test_a_source_that_saves_more_or_is_often_right_or_costs_nothing_is_not_paused(
    sources: Sources, right: int, saved: float, cost: float
) -> None:
    for _ in range(20):
        sources.observe(GUESS, FEWEST_TOKENS, right, saved, cost)
    assert sources.paused == frozenset()


def test_a_pause_ends_in_a_probe_and_each_failed_probe_doubles_the_next_pause(
    sources: Sources, clock: Clock
) -> None:
    pause = FIRST_PAUSE_S
    for _ in range(10):
        fail(sources)
        clock.now += pause - 0.01
        assert sources.paused == {GUESS}
        clock.now += 0.01
        assert sources.paused == frozenset()
        pause = min(2 * pause, LONGEST_PAUSE_S)


def test_a_successful_probe_resets_the_length_of_the_pause(sources: Sources, clock: Clock) -> None:
    for _ in range(3):
        fail(sources)
        clock.now += LONGEST_PAUSE_S
        assert sources.paused == frozenset()
    sources.observe(GUESS, FEWEST_TOKENS, FEWEST_TOKENS, saved=1.0, cost=0.1)
    for _ in range(20):
        fail(sources, tokens=4 * FEWEST_TOKENS)
    clock.now += FIRST_PAUSE_S
    assert sources.paused == frozenset(), "the next pause is as short as the first one"


def test_drafts_from_before_a_pause_do_not_count_against_the_probe(
    sources: Sources, clock: Clock
) -> None:
    fail(sources)
    fail(sources)
    clock.now += FIRST_PAUSE_S
    assert sources.paused == frozenset()
    fail(sources, tokens=10)
    assert sources.paused == frozenset()


def test_old_observations_lose_their_weight(sources: Sources) -> None:
    for _ in range(100):
        sources.observe(GUESS, FEWEST_TOKENS, FEWEST_TOKENS, saved=1.0, cost=0.1)
    for _ in range(100):
        fail(sources)
    assert sources.paused == {GUESS}


def test_sources_are_judged_independently(sources: Sources) -> None:
    fail(sources, GUESS)
    sources.observe(STEP, FEWEST_TOKENS, FEWEST_TOKENS, saved=1.0, cost=0.1)
    assert sources.paused == {GUESS}
    described = sources.describe()
    assert described["guess"]["paused"] is True
    assert described["step"] == {
        "paused": False,
        "accept_rate": 1.0,
        "saved_seconds": 1.0,
        "cost_seconds": 0.1,
    }


def test_at_most_one_warning_is_logged_per_minute(
    sources: Sources, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fail(sources, GUESS)
        fail(sources, STEP)
        assert len(caplog.records) == 1
        assert "'guess' cost more than they save: 9 % of the tokens were right" in caplog.text
        assert "saved 0.100 s and cost 0.200 s. The source is paused for 5 s" in caplog.text
        clock.now += WARNING_INTERVAL_S
        assert sources.paused == frozenset()
        fail(sources, STEP)
        assert len(caplog.records) == 2


def chain(source: Source) -> DraftTree:
    return DraftTree((5, 6, 7), (0, 0, 1), (source,) * 3, (1.0, 0.9, 0.8))


def test_draft_tokens_share_the_cost_of_a_pass_and_accepted_ones_save_time(
    sources: Sources,
) -> None:
    trees = DraftTrees.of([chain(GUESS), chain(STEP)], 3)
    sources.record(trees, [[], [1, 2]], token_seconds=0.02, extra_seconds=0.04)
    described = sources.describe()
    assert described["guess"]["cost_seconds"] == described["step"]["cost_seconds"] == 0.02
    assert described["guess"]["saved_seconds"] == 0.0
    assert described["step"]["saved_seconds"] == 0.04
    assert described["step"]["accept_rate"] == 1.0


def test_a_plain_pass_shows_whether_first_tokens_were_right_at_no_cost(
    sources: Sources,
) -> None:
    trees = DraftTrees.of([chain(GUESS), chain(STEP)], 3)
    sources.update(trees, FirstTokens.of(trees, np.array([9, 6], np.int32)))
    described = sources.describe()
    assert described["guess"]["accept_rate"] == 0.0
    assert described["step"]["accept_rate"] == 1.0
    assert described["guess"]["cost_seconds"] == 0.0
