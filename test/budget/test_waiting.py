"""How long a pass waits for step drafts."""

from sglang_qspec.budget import Patience
from sglang_qspec.budget.waiting import PROBE_AFTER

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
