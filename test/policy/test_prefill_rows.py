"""Which drafts are worth a row in the pass over a prompt."""

import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_qspec.policy import PassCost, PassTimes, PrefillRows

SCORES = np.array([[1.0, 0.9, 0.5, 0.1, 0.0], [1.0, 0.3, 0.2, 0.0, 0.0]], np.float32)
ROOM = np.array([8, 8])


def made(row: float = 0.01) -> PrefillRows:
    """Rows of this relative cost, and plain passes over one request of 1 s."""
    times = PassTimes(PassCost(cheap_rows=0, row=row))
    for _ in range(3):
        times.observe(1, 1, 1.0)
    return PrefillRows(times)


def lengths(policy: PrefillRows, running: int, rooms: NDArray[np.int64] = ROOM) -> list[int]:
    found: list[int] = policy.lengths(SCORES, rooms, policy.least_chance(running)).tolist()
    return found


def test_a_draft_is_verified_if_its_chance_is_worth_the_time_of_its_row() -> None:
    policy = made()
    assert lengths(policy, 1) == [4, 3]
    for _ in range(50):
        policy.observe(100, 101.0 * 0.4)
    assert policy.row_seconds == pytest.approx(0.4, rel=0.02)
    assert lengths(policy, 1) == [3, 1]


def test_many_running_requests_make_a_token_cheap() -> None:
    policy = made(0.02)
    assert policy.least_chance(32) > 10 * policy.least_chance(1)
    assert lengths(policy, 32) < lengths(policy, 1)


def test_a_request_has_no_more_drafts_than_slots() -> None:
    assert lengths(made(), 1, np.array([2, 0])) == [3, 1]


def test_padding_is_never_verified() -> None:
    assert made().lengths(SCORES, ROOM, 0.0).tolist() == [4, 3]


def test_a_short_prompt_does_not_tell_what_a_row_costs() -> None:
    policy = made()
    before = policy.row_seconds
    policy.observe(8, 100.0)
    assert policy.row_seconds == before


def test_drafts_that_decode_passes_accept_make_a_token_cheap() -> None:
    policy = made()
    plain = policy.least_chance(1)
    for _ in range(200):
        policy.observe_decode(2, 8, 6)
    assert policy.least_chance(1) > 2 * plain
