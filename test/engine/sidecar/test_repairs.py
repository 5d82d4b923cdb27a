"""No request costs another its drafts, and messages that a sidecar lacks are sent again."""

from __future__ import annotations

import pytest

from sglang_qspec.engine.sidecar.client import MAX_REPAIRS
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import Delivery, FakeSidecarLink
from sglang_qspec.messages import Commits, Declined, Gap, ToSidecar
from test.engine.sidecar_in_process import pair
from test.engine.simulation import Clock
from test.engine.speculating import commits, enqueue, make, poll, replace_sidecar

STRANGE = ["r" * 5000, "a\ud800", "", "\x00", "🙂" * 3000]


def commits_of(link: FakeSidecarLink) -> list[tuple[int, int, list[int]]]:
    return [(commit.submission, commit.base_len, commit.token_ids) for commit in commits(link)]


@pytest.mark.parametrize("rid", STRANGE, ids=["long", "surrogate", "empty", "zero", "wide"])
def test_a_strange_request_id_costs_no_request_its_drafts(
    rid: str,
) -> None:
    with pair() as both:
        rids = ["a", rid, "b"]
        for number, each in enumerate(rids):
            both.enqueue(each, [10 + 100 * number, 20 + 100 * number])
        both.run()
        for number, each in enumerate(rids):
            both.begin(each, 500 + 100 * number)  # no completion contains it
        for _ in range(4):
            both.serve(rids)
            both.run(30)
        assert min(both.serve(rids)) > 4
        both.active.check_integrity()
        both.drafter.check_integrity()


def test_a_report_that_is_lost_is_noticed_and_repaired() -> None:
    with pair() as both:
        for number, rid in enumerate("ab"):
            both.enqueue(rid, [10 + 100 * number, 20])
        both.run()
        both.begin("a", 500)
        both.begin("b", 600)
        send = both.link.send
        lost: list[Commits] = []

        def lose(message: ToSidecar) -> Delivery:
            if isinstance(message, Commits) and not lost:
                lost.append(message)
                return Delivery.TAKEN
            return send(message)

        both.link.send = lose  # type: ignore[method-assign]
        for _ in range(5):
            both.serve("ab")
            both.run(30)
        assert lost
        assert min(both.serve("ab")) > 4


def test_a_request_that_the_sidecar_has_lost_is_submitted_again() -> None:
    with pair() as both:
        both.enqueue("a", [10, 20])
        both.run()
        both.begin("a", 500)
        both.serve("a")
        (subscriber,) = both.drafter._wanted
        both.drafter._leave(subscriber)
        for _ in range(5):
            both.serve("a")
            both.run(30)
        assert both.serve("a")[0] > 4
        both.active.check_integrity()


def test_requests_that_the_sidecar_has_no_room_for_are_held_back_until_others_end() -> None:
    with pair(max_text_tokens=100) as both:
        for number, rid in enumerate("abc"):
            both.enqueue(rid, [number * 100 + place for place in range(40)])
        both.run()
        assert len(both.drafter._wanted) == 2
        assert both.active.describe()["declined_requests"] == 0
        both.active.end("a")
        both.run()
        assert len(both.drafter._wanted) == 2
        both.begin("c", 240)
        assert both.serve("c")[0] > 4
        both.active.check_integrity()


def test_a_text_that_is_too_long_for_the_draft_model_is_not_sent_and_delays_no_other() -> None:
    with pair() as both:
        both.enqueue("long", range(300))
        both.enqueue("short", [500, 501])
        both.run()
        assert len(both.drafter._wanted) == 1
        assert both.active.describe()["declined_requests"] == 1
        both.begin("short", 502)
        assert both.serve(["short"])[0] > 4


def test_after_a_gap_the_next_report_begins_at_the_length_that_the_sidecar_knows(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    active.propose(["a"], [[8, 300, 301]], 4)
    link.inject(Gap(1, 1))
    link.inject(Gap(1, 3))  # the whole output: nothing is missing
    link.inject(Gap(1, 70))  # beyond the output
    poll(active)
    active.propose(["a"], [[8, 300, 301, 302]], 4)
    assert commits_of(link) == [(1, 0, [8, 300, 301]), (1, 1, [300, 301, 302])]


@pytest.mark.parametrize("known_len", [None, 0])
def test_a_sidecar_that_keeps_reporting_gaps_is_asked_no_more(
    active: Speculator, link: FakeSidecarLink, known_len: int | None
) -> None:
    enqueue(active, max_new_tokens=1000)
    enqueue(active, "b")
    output = [8]
    for token in range(300, 400):
        output.append(token)
        active.propose(["a"], [output], 4)
        submission = active._live["a"].drafting.submission
        if submission is not None:
            link.inject(Gap(submission.number, known_len))
        poll(active)
    assert len(link.submits) <= 2 + MAX_REPAIRS
    assert sum(len(tokens) for _, _, tokens in commits_of(link)) < 200 + 60 * MAX_REPAIRS
    assert active.describe()["declined_requests"] == 1
    assert active._live["b"].drafting.submission is not None
    active.check_integrity()


def test_a_declined_request_continues_without_drafts_until_the_next_sidecar(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    link.inject(Declined(1, "it is too long"))
    poll(active)
    for token in range(300, 305):
        active.propose(["a"], [[8, *range(300, token)]], 4)
        poll(active)
    assert len(link.submits) == 1
    assert link.commits == []
    replace_sidecar(active, link)
    assert len(link.submits) == 2
    active.check_integrity()


def test_a_close_that_the_link_does_not_take_is_sent_later(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    link.queue_full = True
    active.end("a")
    poll(active)
    assert link.closes == []
    link.queue_full = False
    poll(active)
    assert [close.submission for close in link.closes] == [1]


def test_one_poll_does_not_submit_all_requests_to_a_new_sidecar() -> None:
    """Each reading of the clock takes a tenth of a millisecond."""

    class Slow(Clock):
        def __call__(self) -> float:
            self.now += 1e-4
            return self.now

    link = FakeSidecarLink(vocab_size=1000)
    active = make(link, Slow())
    for number in range(500):
        enqueue(active, f"r{number}")
    active.poll()
    assert 1 <= len(link.submits) < 50
    poll(active, 100)
    assert len(link.submits) == 500
