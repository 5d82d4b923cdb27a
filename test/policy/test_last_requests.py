"""What tokens are worth for the end of the batch, and what passes verify accordingly."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_qspec.policy import LastRequests, PassCost, PassTimes, RowBudget
from sglang_qspec.policy.last_requests import CLIENT, MEMORY, NEAR

RIDS = list("abcdefgh")
LEVEL = dict.fromkeys(RIDS, 10.0)
AHEAD = {rid: 10.0 - (rid not in "ab") * (NEAR + 1) for rid in RIDS}
"""Two of eight requests are behind the others."""


def served(ends: LastRequests, batches: int = 64, *, at_limit: bool = True) -> LastRequests:
    """After batches of four requests, in which no other request came."""
    for _ in range(batches):
        for _ in range(4):
            ends.arrive()
        for _ in range(4):
            ends.end(at_limit=at_limit)
        ends.end_batch()
    return ends


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> LastRequests:
    """All answers reach their limit, and no other request comes."""
    monkeypatch.setattr(LastRequests, "certainty", 1.0)
    return LastRequests()


@pytest.mark.parametrize("half", [1.0, 1.5, 2.0])
def test_tokens_of_requests_that_go_on_side_by_side_are_worth_the_same(
    known: LastRequests, half: float
) -> None:
    assert known.worth(RIDS, LEVEL, known.weight(2.0, half)) == pytest.approx(1.0)
    near = dict(zip(RIDS, map(float, range(4)), strict=False))
    assert known.worth(RIDS[:4], near, known.weight(2.0, half)) == pytest.approx(1.0)
    assert known.worth(RIDS[:1], LEVEL, known.weight(2.0, half)) == pytest.approx(1.0)


def test_tokens_of_the_last_requests_are_worth_the_passes_that_they_save(
    known: LastRequests,
) -> None:
    """A pass over half of the batch takes three quarters of the time: half of it goes with rows."""
    worth = known.worth(RIDS, AHEAD, known.weight(2.0, 1.5))
    assert worth[:2] == pytest.approx(CLIENT + (1 - CLIENT) * (0.5 + 0.5 * 4))
    assert worth[2:] == pytest.approx(CLIENT + (1 - CLIENT) * 0.5)
    assert worth.mean() == pytest.approx(1.0)


@pytest.mark.parametrize("half", [1.0, 0.9])
def test_where_all_time_goes_with_rows_no_token_is_worth_more_than_another(
    known: LastRequests, half: float
) -> None:
    assert known.worth(RIDS, AHEAD, known.weight(2.0, half)) == pytest.approx(1.0)


@pytest.mark.parametrize("half", [2.0, 3.0])
def test_where_rows_cost_nothing_tokens_of_the_others_are_worth_something_to_their_clients(
    known: LastRequests, half: float
) -> None:
    assert known.worth(RIDS, AHEAD, known.weight(2.0, half))[2:] == pytest.approx(CLIENT)


def test_half_of_a_batch_is_compared_with_all_running_requests(known: LastRequests) -> None:
    assert known.worth(RIDS[2:], AHEAD, known.weight(2.0, 1.5)) == pytest.approx(
        CLIENT + (1 - CLIENT) * 0.5
    )


def test_a_request_without_drafts_may_be_the_last_one(known: LastRequests) -> None:
    worth = known.worth(["unknown", *RIDS[2:]], AHEAD, known.weight(2.0, 1.5))
    assert worth[0] > 1.0
    assert (worth[1:] < 1.0).all()


def test_an_empty_batch_has_no_tokens(known: LastRequests) -> None:
    assert known.worth([], {}, 1.0).shape == (0,)


def test_the_worth_follows_what_is_known_of_ends() -> None:
    """An answer that may end anywhere may also be the last one."""
    ends = LastRequests()
    assert ends.certainty == 0.25
    served(ends, at_limit=False)
    assert ends.certainty < 0.1
    assert ends.worth(RIDS, AHEAD, ends.weight(2.0, 1.5)) == pytest.approx(1.0, abs=0.1)
    served(ends)
    assert ends.certainty > 0.8
    assert ends.worth(RIDS, AHEAD, ends.weight(2.0, 1.5)).max() > 1.8


def test_clients_that_send_a_request_for_each_answer_keep_the_batch_going() -> None:
    ends = served(LastRequests())
    for _ in range(int(4 * MEMORY)):
        ends.end(at_limit=True)
        ends.arrive()
    assert ends.certainty < 0.1
    served(ends)
    assert ends.certainty > 0.8


def test_requests_that_come_one_by_one_say_nothing_about_batches() -> None:
    ends = LastRequests()
    for _ in range(100):
        ends.arrive()
        ends.end(at_limit=True)
        ends.end_batch()
    assert ends.certainty == pytest.approx(0.5, abs=0.05)


def test_rows_that_cost_much_go_to_the_last_requests_alone(known: LastRequests) -> None:
    """Each request has one draft token that is right in 85 % of all cases."""
    times = PassTimes(PassCost(0, 0, 0.375))  # a quarter of a pass over eight rows is fixed
    budget = RowBudget(4, times=times)
    scores = np.array([[1.0, 0.85, 0.0, 0.0]] * 8, dtype=np.float32)
    assert budget.choose(scores).lengths.tolist() == [2] * 8
    plain, half = times.seconds(8, 1), times.seconds(4, 1)
    worth = known.worth(RIDS, AHEAD, known.weight(plain, half))
    assert budget.choose(scores, worth).lengths.tolist() == [2, 2, *[1] * 6]
