"""A pass verifies the guesses that raise its tokens per second, by what was measured."""

from __future__ import annotations

import pytest

from sglang_qspec.sidecar.guess_choice import EXPLORE, GuessChoice


def choice_of(*times: tuple[int, float]) -> GuessChoice:
    made = GuessChoice()
    made.expect(times)
    return made


def test_where_rows_are_free_all_guesses_are_verified() -> None:
    choice = choice_of((1, 1.0), (64, 1.0))
    assert sorted(choice.choose(3, [0.9, 0.15, 0.5])) == [0, 1, 2]


def test_where_rows_cost_only_likely_guesses_are_verified() -> None:
    # A row of 8 costs a tenth of a pass, and a token an eighth of it.
    choice = choice_of((8, 1.0), (16, 1.8))
    assert choice.choose(8, [0.55, 0.95, 0.15, 0.85, 0.95]) == [1, 4, 3]


def test_without_known_times_guesses_cost_nothing() -> None:
    assert GuessChoice().choose(2, [0.15]) == [0]


def test_probabilities_count_as_guesses_turned_out() -> None:
    choice = choice_of((1, 1.0), (2, 1.5))
    assert choice.choose(1, [0.95]) == [0]
    for _ in range(30):
        choice.judge(0.95, right=False)
    assert choice.choose(1, [0.95]) == []
    assert choice.choose(1, [0.75]) == [0]
    for number in range(300):
        choice.judge(0.95, right=number % 5 != 0)
    assert choice.choose(1, [0.95]) == [0]


def test_passes_tell_what_a_row_costs() -> None:
    choice = choice_of((1, 1.0), (2, 1.0))
    assert choice.choose(1, [0.35]) == [0]
    for _ in range(60):
        choice.observe_pass(2, 1.9)
    assert choice.choose(1, [0.35]) == []


def test_the_head_is_asked_now_and_then_where_guesses_do_not_pay() -> None:
    choice = choice_of((1, 1.0), (2, 2.0), (8, 2.0), (16, 2.0))
    assert choice.asks(1)
    for _ in range(3):
        choice.observe_call(0.1)
        choice.choose(1, [0.55])
    assert [choice.asks(1) for _ in range(2 * EXPLORE)].count(True) == 2
    choice.choose(8, [0.95] * 8)
    assert choice.asks(8)


def test_a_row_that_has_become_cheap_is_found_out() -> None:
    choice = choice_of((1, 1.0), (2, 2.0))
    choice.observe_call(0.05)
    verified = 0
    for _ in range(40 * EXPLORE):
        if choice.asks(1):
            count = len(choice.choose(1, [0.55]))
            choice.observe_pass(1 + count, 1.0)
            verified += count
    assert verified > 20 * EXPLORE


@pytest.mark.parametrize("seconds", [0.2, 0.5])
def test_a_slow_head_does_not_pay(seconds: float) -> None:
    choice = choice_of((1, 1.0), (2, 1.0))
    choice.observe_call(seconds)
    for _ in range(20):
        choice.choose(1, [0.35])
    assert choice.asks(1) == (seconds == 0.2)
