"""Passes over requests of a low priority stay short while requests of a higher one arrive."""

from __future__ import annotations

import math

import pytest

from sglang_qspec.policy import Precedence, RowBudget, WidthPolicy
from sglang_qspec.policy.precedence import LONGEST, RECENT_S
from sglang_qspec.trie import DraftTrees
from test.engine.simulation import Clock
from test.policy.chains import chain, linear

CHAT, LINE = -1000, 0
"""Priorities as ranks: the smaller one comes first."""


def test_no_pass_is_limited_while_all_requests_have_one_priority() -> None:
    precedence = Precedence(Clock())
    assert precedence.longest_pass([LINE, LINE]) == math.inf
    precedence.arrive(LINE)
    assert precedence.longest_pass([LINE, LINE]) == math.inf
    assert precedence.longest_pass([]) == math.inf


def test_lines_have_short_passes_from_the_arrival_of_a_chat_until_none_has_come_for_long() -> None:
    clock = Clock()
    precedence = Precedence(clock)
    for _ in range(2):
        precedence.arrive(LINE)
        precedence.arrive(CHAT)
        precedence.arrive(LINE)
        assert precedence.longest_pass([LINE]) == LONGEST
        assert precedence.longest_pass([CHAT, LINE]) == LONGEST
        assert precedence.longest_pass([CHAT]) == math.inf
        clock.now += RECENT_S - 1.0
        precedence.arrive(CHAT)
        clock.now += RECENT_S - 1.0
        assert precedence.longest_pass([LINE]) == LONGEST
        clock.now += 1.0
        assert precedence.longest_pass([LINE]) == math.inf


def test_after_the_last_chat_the_next_lower_priority_comes_first() -> None:
    clock = Clock()
    precedence = Precedence(clock)
    precedence.arrive(CHAT)
    clock.now += RECENT_S
    precedence.arrive(LINE)
    assert precedence.longest_pass([LINE]) == math.inf
    assert precedence.longest_pass([LINE + 1]) == LONGEST


@pytest.mark.parametrize("policy", [RowBudget, WidthPolicy])
def test_a_pass_takes_at_most_a_multiple_of_one_without_drafts(
    policy: type[RowBudget] | type[WidthPolicy],
) -> None:
    """A pass over one request takes 1.1 with one row, and 0.1 more for each further row."""
    trees = DraftTrees.of([chain(*[0.99] * 7)], 8)
    made = policy(8, times=linear(0.1))
    assert made.choose(trees.scores).width == 8
    short = made.choose(trees.scores, longest=LONGEST)
    assert (short.width, short.seconds <= LONGEST * made.times.seconds(1, 1)) == (3, True)
    assert made.choose(trees.scores, longest=1.0).width == 1
