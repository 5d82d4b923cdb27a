"""The server asks an overloaded sidecar for less, and for more again once the overload ends."""

from __future__ import annotations

import pytest

from sglang_qspec.engine.sidecar.backpressure import GROWTH, SHORTEST_S, Backpressure, fewer
from sglang_qspec.engine.sidecar.client import MAX_REPAIRS
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Declined, Heartbeat, OverloadLevel, Submit
from test.engine.simulation import Clock
from test.engine.speculating import commits, connect, enqueue, poll

RETRY_S = 2.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def load(link: FakeSidecarLink, level: int) -> None:
    """Let the sidecar report a level of overload."""
    link.inject(Heartbeat(0, 0, 0, 0, backlog_s=60.0, overload=level))


def overloaded(link: FakeSidecarLink, clock: Clock, level: int, **settings: object) -> Speculator:
    active = connect(link, clock, **settings)
    load(link, level)
    poll(active)
    return active


def decline(link: FakeSidecarLink, number: int, retry_after_s: float = RETRY_S) -> None:
    link.inject(Declined(number, "overload", retry=True, retry_after_s=retry_after_s))


@pytest.mark.parametrize(
    ("level", "asked"),
    [(0, 8), (OverloadLevel.SERVED, 8), (OverloadLevel.HALF, 4), (OverloadLevel.FIRST, 1), (99, 1)],
)
def test_the_server_asks_for_fewer_completions_by_the_level(
    clock: Clock, level: int, asked: int
) -> None:
    link = FakeSidecarLink()
    active = overloaded(link, clock, level)
    enqueue(active)
    poll(active)
    assert [submit.completions for submit in link.submits] == [asked]
    state = active.describe()
    assert (state["sidecar_overload"], state["sidecar_backlog_seconds"]) == (level, 60.0)
    load(link, 0)
    poll(active)
    enqueue(active, "b")
    assert link.submits[-1].completions == 8


def test_at_least_one_completion_is_asked_for() -> None:
    assert [fewer(count, OverloadLevel.HALF) for count in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert [fewer(count, OverloadLevel.FIRST) for count in (0, 1, 2)] == [0, 1, 1]


@pytest.mark.parametrize(("mode", "asked"), [("ahead", 0), ("queue", 1)])
def test_a_served_request_asks_for_step_drafts_alone(clock: Clock, mode: str, asked: int) -> None:
    link = FakeSidecarLink()
    active = connect(link, clock, mode=mode)
    link.queue_full = True
    enqueue(active)
    load(link, OverloadLevel.FIRST)
    poll(active)
    active.admit("a")
    link.queue_full = False
    poll(active)
    assert [submit.completions for submit in link.submits] == [asked]


def test_a_declined_request_waits_uses_no_repair_and_is_submitted_again(clock: Clock) -> None:
    link = FakeSidecarLink()
    active = overloaded(link, clock, OverloadLevel.DECLINE)
    enqueue(active)
    for number in range(1, 3 * MAX_REPAIRS):
        assert len(link.submits) == number
        decline(link, number)
        poll(active)
        clock.now += 0.9 * RETRY_S
        poll(active)
        assert len(link.submits) == number
        clock.now += 0.2 * RETRY_S
        poll(active)
    assert active.describe()["declined_requests"] == 0
    assert active._live["a"].drafting.repairs == 0
    active.check_integrity()


def test_the_server_sends_fewer_submissions_until_the_overload_ends(clock: Clock) -> None:
    link = FakeSidecarLink()
    active = overloaded(link, clock, OverloadLevel.DECLINE)
    for number in range(40):
        enqueue(active, f"r{number}")
    assert len(link.submits) == 40
    for number in range(11, 41):
        decline(link, number)
    poll(active)
    assert len(link.submits) == 40
    active.end("r0")  # an ended submission makes room for one
    poll(active)
    assert len(link.submits) == 41
    clock.now += 1.1 * RETRY_S
    poll(active)
    assert len(link.submits) == 41 + GROWTH
    load(link, OverloadLevel.SHORT)
    clock.now += 1.1 * RETRY_S
    poll(active)
    assert len(link.submits) == 70
    active.check_integrity()


def test_a_held_request_gets_step_drafts_once_the_target_serves_it(clock: Clock) -> None:
    link = FakeSidecarLink()
    active = overloaded(link, clock, OverloadLevel.DECLINE, mode="ahead")
    for rid in "abc":
        enqueue(active, rid)
    for number in (1, 2, 3):
        decline(link, number)
    poll(active)
    assert len(link.submits) == 3
    active.admit("c")
    poll(active)
    assert [submit.completions for submit in link.submits[3:]] == [0]
    active.propose(["c"], [[8]], 4)
    assert [commit.submission for commit in commits(link)] == [4]
    active.check_integrity()


def test_a_sidecar_that_declines_everything_gets_few_submissions(clock: Clock) -> None:
    class Unwilling(FakeSidecarLink):
        def _draft(self, submit: Submit) -> None:
            decline(self, submit.submission, retry_after_s=1e-9)

    link = Unwilling()
    active = overloaded(link, clock, OverloadLevel.DECLINE, mode="ahead")
    for number in range(20):
        enqueue(active, f"r{number}")
    active.admit("r0")
    for _ in range(1000):
        active.poll()
    assert len(link.submits) <= 20 + 2 * MAX_REPAIRS
    for _ in range(100):
        clock.now += SHORTEST_S
        active.poll()
    assert len(link.submits) <= 20 + 2 * MAX_REPAIRS + 100 * (GROWTH + 1)
    assert active.describe()["declined_requests"] <= 1  # the served one
    active.check_integrity()


def test_a_new_sidecar_is_asked_without_a_limit(clock: Clock) -> None:
    link = FakeSidecarLink()
    active = overloaded(link, clock, OverloadLevel.DECLINE)
    enqueue(active, "a")
    decline(link, 1)
    poll(active)
    link.die()
    poll(active)
    assert active.describe()["sidecar_overload"] == 0
    link.revive()
    poll(active)
    assert len(link.submits) == 2


def test_the_wait_that_a_sidecar_asks_for_has_a_maximum(clock: Clock) -> None:
    backpressure = Backpressure(clock)
    backpressure.note_declined(5, 1e9)
    assert not backpressure.allow(5, 0)
    assert backpressure.allow(4, 0)
    clock.now += 61
    assert backpressure.allow(5, 0)
