"""The time that a pass waits for step drafts."""

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
    """NOW with `tokens` more expected tokens and `seconds` more pass time."""
    return Choice(4, NOW.tokens + tokens, NOW.seconds + seconds)


def test_a_wait_lasts_at_most_the_time_that_it_can_save() -> None:
    assert WaitBudget().seconds(1, NOW, with_more(0.9)) == pytest.approx(0.9 / NOW.rate)


def test_the_extra_time_of_a_wider_pass_is_subtracted_from_the_wait() -> None:
    wider = with_more(0.9, 0.01)
    assert WaitBudget().seconds(1, NOW, wider) == pytest.approx(0.9 / NOW.rate - 0.01)
    assert WaitBudget().seconds(1, NOW, with_more(0.9, 0.02)) == 0.0


def test_there_is_no_wait_without_a_gain() -> None:
    assert WaitBudget().seconds(1, NOW, NOW) == 0.0


def test_we_wait_only_for_tokens_that_arrive_at_a_better_rate() -> None:
    budget = WaitBudget()
    budget.observe(2, 0.010, came=True)
    assert budget.seconds(2, NOW, with_more(1.8)) > 0.0
    assert budget.seconds(2, NOW, with_more(0.5)) == 0.0


def test_waits_for_a_silent_sidecar_stop_soon_and_are_tried_again_later() -> None:
    budget = WaitBudget()
    waits = []
    for _ in range(3 * PROBE_AFTER):
        seconds = budget.seconds(1, NOW, with_more(0.9))
        waits.append(seconds)
        if seconds:
            budget.observe(1, seconds, came=False)
    assert sum(map(bool, waits)) <= 5
    assert any(waits[PROBE_AFTER:])


def test_each_batch_size_has_its_own_step_time() -> None:
    budget = WaitBudget()
    budget.observe(16, 1.0, came=True)
    assert budget.seconds(16, NOW, with_more(0.9)) == 0.0
    assert budget.seconds(1, NOW, with_more(0.9)) > 0.0


def test_the_score_of_the_next_step_token_is_the_product_along_its_path() -> None:
    short = DraftTree((5,), (0,), (Source.STEP,), (1.0,))
    long = DraftTree((5, 6), (0, 0), (Source.STEP,) * 2, (1.0, 0.5))
    trees = DraftTrees.of([short, long], 4)
    assert with_next_steps(trees, np.array([True, True]), 0.9).tolist() == [
        pytest.approx([1.0, 0.9, 0.0, 0.0]),
        pytest.approx([1.0, 0.5, 0.45, 0.0]),
    ]
    assert with_next_steps(trees, np.array([False, False]), 0.9).tolist() == trees.scores.tolist()


def test_the_next_step_token_is_ranked_by_score_and_replaces_the_last_in_a_full_tree() -> None:
    sources = (Source.STEP, Source.STEP, Source.OUTPUT)
    tree = DraftTree((5, 6, 7), (0, 0, 0), sources, (1.0, 0.8, 0.1))
    trees = DraftTrees.of([tree], 3)
    more = with_next_steps(trees, np.array([True]), 0.5)
    assert more.tolist() == [pytest.approx([1.0, 0.8, 0.4])]


def test_the_deadline_for_drafts_is_a_multiple_of_the_step_time() -> None:
    deadline = DraftDeadline()
    assert deadline.seconds(None) == LATE * FIRST_STEP
    assert deadline.seconds(0.01) == LATE * 0.01
    assert deadline.seconds(0.0) == LATE * SHORTEST_STEP
    assert deadline.seconds(1e9) == LONGEST_WAIT


def test_waits_for_a_late_sidecar_become_rarer() -> None:
    deadline = DraftDeadline()
    waits = []
    for _ in range(4 * PROBE_AFTER):
        waits.append(bool(deadline.seconds(0.01)))
        if waits[-1]:
            deadline.observe(came=False)
    assert waits[:6] == [True, False, True, False, False, True]
    assert sum(waits) <= 10
    assert any(waits[-PROBE_AFTER - 1 :])


def test_a_sidecar_that_is_on_time_again_is_waited_for_in_every_pass() -> None:
    deadline = DraftDeadline()
    for _ in range(5):
        deadline.observe(came=False)
    while not deadline.seconds(0.01):
        pass
    deadline.observe(came=True)
    assert [bool(deadline.seconds(0.01)) for _ in range(20)] == [True] * 20
