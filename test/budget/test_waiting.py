"""How long a pass waits for step drafts."""

import numpy as np
import pytest

from sglang_qspec.budget import Patience, Punctuality, expected_gain
from sglang_qspec.budget.waiting import (
    FIRST_STEP,
    LATE,
    LONGEST_WAIT,
    PROBE_AFTER,
    SHORTEST_STEP,
)
from sglang_qspec.trie import DraftTree, DraftTrees, Source

RATE = 50.0
"""Tokens per second without a wait."""


def test_a_wait_ends_when_it_has_cost_what_it_can_gain() -> None:
    assert Patience().seconds(1, 0.9, RATE) == 0.9 / RATE


def test_there_is_no_wait_for_what_gains_nothing() -> None:
    assert Patience().seconds(1, 0.0, RATE) == 0.0


def test_tokens_that_come_at_a_better_rate_are_waited_for_and_others_are_not() -> None:
    patience = Patience()
    patience.observe(2, 0.010, came=True)
    assert patience.seconds(2, 1.8, RATE) == 1.8 / RATE
    assert patience.seconds(2, 0.5, RATE) == 0.0


def test_a_sidecar_that_sends_nothing_is_soon_not_waited_for_and_tried_again_later() -> None:
    patience = Patience()
    waits = []
    for _ in range(3 * PROBE_AFTER):
        seconds = patience.seconds(1, 0.9, RATE)
        waits.append(seconds)
        if seconds:
            patience.observe(1, seconds, came=False)
    assert sum(map(bool, waits)) <= 5
    assert any(waits[PROBE_AFTER:])


def test_each_size_of_batch_is_remembered_by_itself() -> None:
    patience = Patience()
    patience.observe(16, 1.0, came=True)
    assert patience.seconds(16, 0.9, RATE) == 0.0
    assert patience.seconds(1, 0.9, RATE) > 0.0


def test_a_token_gains_its_chance_on_each_draft_that_is_awaited() -> None:
    short = DraftTree((5,), (0,), (Source.STEP,), (1.0,))
    long = DraftTree((5, 6), (0, 0), (Source.STEP,) * 2, (1.0, 0.5))
    trees = DraftTrees.of([short, long], 4)
    assert expected_gain(trees, np.array([True, True]), 0.9) == pytest.approx(0.9 * 1.5)
    assert expected_gain(trees, np.array([False, True]), 0.9) == pytest.approx(0.9 * 0.5)
    assert expected_gain(trees, np.array([False, False]), 0.9) == 0.0


def test_drafts_that_are_seldom_right_gain_little() -> None:
    trees = DraftTrees.of([DraftTree((5,), (0,), (Source.STEP,), (1.0,))] * 2, 4)
    awaited, factors = np.array([True, True]), np.array([1.0, 0.2])
    assert expected_gain(trees, awaited, 0.1) == pytest.approx(0.2)
    assert expected_gain(trees, awaited, 0.9, factors) == pytest.approx(0.9 * 1.2)


def test_drafts_that_a_pass_is_made_for_are_waited_for_until_they_are_late() -> None:
    punctuality = Punctuality()
    assert punctuality.seconds(None) == LATE * FIRST_STEP
    assert punctuality.seconds(0.01) == LATE * 0.01
    assert punctuality.seconds(0.0) == LATE * SHORTEST_STEP
    assert punctuality.seconds(1e9) == LONGEST_WAIT


def test_a_sidecar_that_is_late_is_waited_for_less_and_less_often() -> None:
    punctuality = Punctuality()
    waits = []
    for _ in range(4 * PROBE_AFTER):
        waits.append(bool(punctuality.seconds(0.01)))
        if waits[-1]:
            punctuality.observe(came=False)
    assert waits[:6] == [True, False, True, False, False, True]
    assert sum(waits) <= 10
    assert any(waits[-PROBE_AFTER - 1 :])


def test_one_that_is_back_in_time_is_waited_for_as_before() -> None:
    punctuality = Punctuality()
    for _ in range(5):
        punctuality.observe(came=False)
    while not punctuality.seconds(0.01):
        pass
    punctuality.observe(came=True)
    assert [bool(punctuality.seconds(0.01)) for _ in range(20)] == [True] * 20
