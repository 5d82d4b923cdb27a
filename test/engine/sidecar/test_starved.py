"""A sidecar rests while the target has its CPUs, and the link knows that it may be silent."""

from __future__ import annotations

import pytest

from sglang_qspec.link.fake import FakeSidecarLink
from test.engine.speculating import enqueue, make


@pytest.mark.parametrize("starved", [True, False])
@pytest.mark.parametrize("requests", [0, 1])
def test_the_sidecar_can_answer_while_no_request_keeps_its_cpus(
    starved: bool, requests: int
) -> None:
    link = FakeSidecarLink()
    active = make(link)
    for number in range(requests):
        enqueue(active, str(number))
    active.sidecar.starve(starved)
    active.sidecar.receive()
    assert link.starved is (starved and requests > 0)


def test_a_sidecar_whose_cpus_are_in_use_rests_until_they_are_not() -> None:
    link = FakeSidecarLink()
    active = make(link)
    enqueue(active, "a")
    active.poll()
    for starved in (True, True, False, False, True):
        active.sidecar.starve(starved)
        active.poll()
    assert link.rests == [True, False, True]
    active.end("a")
    active.poll()
    assert link.rests == [True, False, True], "there is nothing to draft"
    enqueue(active, "b")
    active.poll()
    assert link.rests == [True, False, True], "the next pass may need all CPUs"
    active.sidecar.starve(False)
    assert link.rests == [True, False, True, False]


def test_a_sidecar_with_cpus_of_its_own_is_never_told_to_rest_or_to_go_on() -> None:
    link = FakeSidecarLink()
    active = make(link)
    for rid in "ab":
        enqueue(active, rid)
        active.poll()
        active.end(rid)
        active.poll()
    assert link.rests == []


def test_a_rest_that_the_link_does_not_take_is_said_again() -> None:
    link = FakeSidecarLink()
    active = make(link)
    enqueue(active, "a")
    active.poll()
    link.queue_full = True
    active.sidecar.starve(True)
    active.poll()
    assert link.rests == []
    link.queue_full = False
    active.poll()
    active.poll()
    assert link.rests == [True]


def test_a_new_sidecar_is_told_to_rest_too() -> None:
    link = FakeSidecarLink()
    active = make(link)
    enqueue(active, "a")
    active.poll()
    active.sidecar.starve(True)
    link.revive()
    for _ in range(3):
        active.poll()
    assert len(link.submits) == 2
    assert link.rests[-1] is True
    assert len(link.rests) >= 2


def test_a_sidecar_that_refuses_this_server_does_not_come() -> None:
    link = FakeSidecarLink()
    sidecars = make(link).sidecar
    assert sidecars.may_come
    assert not sidecars.ready
    link.refuse("another tokenizer")
    assert not sidecars.may_come
