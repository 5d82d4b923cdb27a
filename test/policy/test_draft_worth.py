"""What draft tokens are worth follows the tokens that were judged, by purpose and position."""

from __future__ import annotations

import pytest

from sglang_qspec.policy.draft_worth import (
    DEEPEST,
    KEPT,
    MEMORY,
    REFRESH,
    SOONER,
    DraftWorth,
    Purpose,
)

STEP, FIRST, OTHER, SERVED = Purpose


def judged(worth: DraftWorth, purpose: Purpose, position: int, saved: int, count: int) -> None:
    for number in range(count):
        worth.judge(purpose, position, saved=number < saved)
    refresh(worth)


def refresh(worth: DraftWorth) -> None:
    for _ in range(REFRESH):
        worth.fade()


def test_before_anything_is_judged_the_order_is_that_of_urgency() -> None:
    worth = DraftWorth()
    values = [worth.value(purpose, 0) for purpose in Purpose]
    assert values == sorted(values, reverse=True)
    for purpose in Purpose:
        assert worth.value(purpose, 5) < worth.value(purpose, 0)


def test_step_drafts_that_come_too_late_are_worth_less_than_those_of_waiting_prompts() -> None:
    worth = DraftWorth()
    for position in range(DEEPEST + 1):
        judged(worth, STEP, position, saved=0, count=100)
    assert worth.value(STEP, 0) < worth.value(FIRST, 0)
    judged(worth, STEP, 0, saved=200, count=200)
    assert worth.value(STEP, 0) > worth.value(FIRST, 0)


def test_each_position_has_its_own_chance() -> None:
    worth = DraftWorth()
    judged(worth, FIRST, 8, saved=0, count=100)
    judged(worth, FIRST, 3, saved=90, count=100)
    assert worth.chances[FIRST, 3] == pytest.approx(0.9, abs=0.02)
    assert worth.chances[FIRST, 8] < 0.03
    assert worth.chances[FIRST, 7] > 0.3
    assert worth.chances[FIRST, 9] < 0.03, "it is like the one before until it is judged"


def test_a_worthless_token_that_others_need_is_worth_what_they_are() -> None:
    worth = DraftWorth()
    judged(worth, STEP, 0, saved=0, count=200)
    assert worth.value(STEP, 0) < 0.2, "and the others are likely worth nothing either"
    for position in range(1, 9):
        judged(worth, STEP, position, saved=200, count=200)
    assert worth.value(STEP, 0) > 0.8 * SOONER
    assert worth.value(STEP, 0) < worth.value(STEP, 1)


def test_positions_behind_the_deepest_count_as_one() -> None:
    worth = DraftWorth()
    judged(worth, SERVED, DEEPEST + 40, saved=100, count=100)
    assert worth.value(SERVED, DEEPEST) == worth.value(SERVED, DEEPEST + 9) > 0.9


def test_what_was_worthless_is_tried_again_in_few_passes() -> None:
    worth, tried, passes = DraftWorth(), 0, 20_000
    for number in range(passes):
        if worth.value(STEP, 0) > worth.value(FIRST, 0):
            tried += number > passes / 2
            for position in range(DEEPEST + 1):
                worth.judge(STEP, position, saved=False)
        worth.fade()
    assert 0 < tried < 0.1 * passes / 2


def test_recent_tokens_count_more_than_old_ones() -> None:
    worth = DraftWorth()
    judged(worth, STEP, 0, saved=1000, count=1000)
    judged(worth, STEP, 0, saved=0, count=round(MEMORY))
    assert worth.chances[STEP, 0] < 0.5
    assert worth.value(STEP, 0) < SOONER * 0.9
    assert 0.5 < KEPT < 1.0
