"""How long a pass waits for step drafts."""

import numpy as np
import pytest

from sglang_qspec.policy import Choice, DraftDeadline, WaitBudget, with_next_steps
from sglang_qspec.policy.waiting import (
    FIRST_STEP,
    LATE,
    LONGEST_WAIT,
    PROBE_AFTER,
    SHORTEST_STEP,
)
from sglang_qspec.trie import DraftTree, DraftTrees, Source

NOW = Choice(4, tokens=2.0, seconds=0.04)
"""A pass without a wait."""


def with_more(tokens: float, seconds: float = 0.0) -> Choice:
    """The same with so many tokens more, in so many more seconds."""
    return Choice(4, NOW.tokens + tokens, NOW.seconds + seconds)


def test_a_wait_ends_when_it_has_cost_what_it_can_gain() -> None:
    assert WaitBudget().seconds(1, NOW, with_more(0.9)) == pytest.approx(0.9 / NOW.rate)


def test_what_a_wider_pass_takes_is_no_gain() -> None:
    wider = with_more(0.9, 0.01)
    assert WaitBudget().seconds(1, NOW, wider) == pytest.approx(0.9 / NOW.rate - 0.01)
    assert WaitBudget().seconds(1, NOW, with_more(0.9, 0.02)) == 0.0


def test_there_is_no_wait_for_what_gains_nothing() -> None:
    assert WaitBudget().seconds(1, NOW, NOW) == 0.0


def test_tokens_that_come_at_a_better_rate_are_waited_for_and_others_are_not() -> None:
    budget = WaitBudget()
    budget.observe(2, 0.010, came=True)
    assert budget.seconds(2, NOW, with_more(1.8)) > 0.0
    assert budget.seconds(2, NOW, with_more(0.5)) == 0.0


def test_a_sidecar_that_sends_nothing_is_soon_not_waited_for_and_tried_again_later() -> None:
    budget = WaitBudget()
    waits = []
    for _ in range(3 * PROBE_AFTER):
        seconds = budget.seconds(1, NOW, with_more(0.9))
        waits.append(seconds)
        if seconds:
            budget.observe(1, seconds, came=False)
    assert sum(map(bool, waits)) <= 5
    assert any(waits[PROBE_AFTER:])


def test_each_size_of_batch_is_remembered_by_itself() -> None:
    budget = WaitBudget()
    budget.observe(16, 1.0, came=True)
    assert budget.seconds(16, NOW, with_more(0.9)) == 0.0
    assert budget.seconds(1, NOW, with_more(0.9)) > 0.0


def test_the_next_token_of_a_draft_has_its_chance_if_all_before_it_are_right() -> None:
    short = DraftTree((5,), (0,), (Source.STEP,), (1.0,))
    long = DraftTree((5, 6), (0, 0), (Source.STEP,) * 2, (1.0, 0.5))
    trees = DraftTrees.of([short, long], 4)
    assert with_next_steps(trees, np.array([True, True]), 0.9).tolist() == [
        pytest.approx([1.0, 0.9, 0.0, 0.0]),
        pytest.approx([1.0, 0.5, 0.45, 0.0]),
    ]
    assert with_next_steps(trees, np.array([False, False]), 0.9).tolist() == trees.scores.tolist()


def test_the_next_token_takes_its_place_among_others_and_in_a_full_tree_that_of_the_last() -> None:
    sources = (Source.STEP, Source.STEP, Source.OUTPUT)
    tree = DraftTree((5, 6, 7), (0, 0, 0), sources, (1.0, 0.8, 0.1))
    trees = DraftTrees.of([tree], 3)
    more = with_next_steps(trees, np.array([True]), 0.5)
    assert more.tolist() == [pytest.approx([1.0, 0.8, 0.4])]


def test_drafts_that_a_pass_is_made_for_are_waited_for_until_they_are_late() -> None:
    deadline = DraftDeadline()
    assert deadline.seconds(None) == LATE * FIRST_STEP
    assert deadline.seconds(0.01) == LATE * 0.01
    assert deadline.seconds(0.0) == LATE * SHORTEST_STEP
    assert deadline.seconds(1e9) == LONGEST_WAIT


def test_a_sidecar_that_is_late_is_waited_for_less_and_less_often() -> None:
    deadline = DraftDeadline()
    waits = []
    for _ in range(4 * PROBE_AFTER):
        waits.append(bool(deadline.seconds(0.01)))
        if waits[-1]:
            deadline.observe(came=False)
    assert waits[:6] == [True, False, True, False, False, True]
    assert sum(waits) <= 10
    assert any(waits[-PROBE_AFTER - 1 :])


def test_one_that_is_back_in_time_is_waited_for_as_before() -> None:
    deadline = DraftDeadline()
    for _ in range(5):
        deadline.observe(came=False)
    while not deadline.seconds(0.01):
        pass
    deadline.observe(came=True)
    assert [bool(deadline.seconds(0.01)) for _ in range(20)] == [True] * 20
