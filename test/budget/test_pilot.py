"""Which pipeline is chosen."""

from sglang_qspec.budget import Course, PassCost, PassTimes, Pilot
from sglang_qspec.budget.pilot import PERIOD, VOTES

SETTLED = PERIOD * (VOTES + 1)
GOOD, BAD = 0.97, 0.5


def times(cost: PassCost, one_row: float) -> PassTimes:
    measured = PassTimes(cost)
    measured.observe(1, 1, one_row)
    return measured


FLAT = PassCost(cheap_row=0.0, row=0.0)
STEEP = PassCost(cheap_rows=0, row=1.0)
"""A pass's time is as its rows, nearly."""


def course(
    pilot: Pilot, requests: int, agreement: float, step: float, rounds: int = SETTLED
) -> list[str]:
    return [
        pilot.choose(
            requests,
            widest=5,
            fixed=False,
            lead=16,
            agreement=agreement,
            step_times=[(1.0, step), (2.0 * requests, 2 * step)],
        ).pipeline
        for _ in range(rounds)
    ]


def test_where_a_pass_takes_as_long_for_twice_as_many_the_batch_is_drafted_ahead() -> None:
    assert set(course(Pilot(times(FLAT, 0.04)), 8, GOOD, step=0.01)) == {"ahead"}


def test_where_it_takes_twice_as_long_and_drafts_go_wrong_the_batch_is_halved() -> None:
    pilot = Pilot(times(STEEP, 0.004))
    assert course(pilot, 8, BAD, step=0.016)[-1] == "halves"


def test_the_course_is_changed_once_and_for_more_than_a_passing_reason() -> None:
    pilot = Pilot(times(STEEP, 0.004))
    chosen = course(pilot, 8, BAD, step=0.016, rounds=PERIOD * VOTES - 1)
    assert set(chosen) == {"ahead"}
    chosen = course(pilot, 8, BAD, step=0.016, rounds=20 * PERIOD)
    assert set(chosen) == {"halves"}
    course(pilot, 8, GOOD, step=0.0001, rounds=PERIOD)
    assert course(pilot, 8, BAD, step=0.016, rounds=PERIOD)[-1] == "halves"


def test_sizes_of_batches_have_courses_of_their_own() -> None:
    pilot = Pilot(times(STEEP, 0.004))
    course(pilot, 8, BAD, step=0.016)
    assert course(pilot, 2, GOOD, step=0.0001)[-1] == "ahead"
    assert course(pilot, 8, BAD, step=0.016, rounds=1) == ["halves"]


def test_one_request_has_no_halves_and_without_measurements_there_is_no_choice() -> None:
    pilot = Pilot(times(STEEP, 0.004))
    assert set(course(pilot, 1, BAD, step=0.016)) == {"ahead"}
    unmeasured = pilot.choose(8, widest=5, fixed=False, lead=16, agreement=BAD, step_times=[])
    assert unmeasured == Course("ahead", 5)


def test_halves_are_drafted_for_only_as_far_as_pays_unless_all_passes_have_one_width() -> None:
    for fixed, width in ((False, 2), (True, 16)):
        pilot = Pilot(times(STEEP, 0.004))
        for _ in range(SETTLED):
            chosen = pilot.choose(
                8,
                widest=16,
                fixed=fixed,
                lead=16,
                agreement=BAD,
                step_times=[(1.0, 0.006), (16.0, 0.016)],
            )
        assert chosen == Course("halves", width)
