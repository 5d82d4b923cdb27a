"""Several sidecars of one server, over fake links."""

from __future__ import annotations

import logging

import pytest

from sglang_qspec.engine.sidecar.router import HANDOVER_S
from sglang_qspec.link.link import POLL_BUDGET_S
from sglang_qspec.messages import Declined, Drafted, Heartbeat
from sglang_qspec.policy.routing import BEGINNING
from test.engine.sidecar.sidecar_fleet import Fleet
from test.engine.speculating import PROMPT, poll, tree_of

SOME = 12
"""Number of different prompts that surely reach both of two sidecars: no more than nine fit one."""


@pytest.fixture
def two() -> Fleet:
    return Fleet("a", "b")


def test_both_sidecars_get_requests(two: Fleet) -> None:
    rids = [f"r{number}" for number in range(SOME)]
    two.enqueue(*rids)
    assert two.of("a") | two.of("b") == set(rids)
    assert two.of("a")
    assert two.of("b")
    for endpoint, link in two.links.items():
        assert len(link.submits) == len(two.of(endpoint))
    two.check()


def test_equal_prompts_meet_on_one_sidecar_whatever_its_load(two: Fleet) -> None:
    rids = [f"r{number}" for number in range(40)]
    for number, rid in enumerate(rids):
        two.enqueue(rid, prompt_ids=PROMPT)
        heartbeat = Heartbeat(1000 * (number % 2), 0, 0, 0)
        two.links["a"].inject(heartbeat)
    assert sorted(map(len, (two.of("a"), two.of("b")))) == [0, len(rids)]
    two.check()


def test_equal_prompts_of_different_scopes_spread_over_the_sidecars(two: Fleet) -> None:
    """They share neither drafts nor KV, so they have no reason to meet."""
    for number in range(SOME):
        two.enqueue(f"r{number}", prompt_ids=PROMPT, scope=(None, None, f"salt {number}"))
    assert two.of("a")
    assert two.of("b")
    two.check()


def test_prompts_with_one_beginning_meet_until_their_sidecar_has_too_many(two: Fleet) -> None:
    shared = list(range(BEGINNING))
    two.enqueue("first", prompt_ids=[*shared, 900])
    home = "a" if two.of("a") else "b"
    two.enqueue("second", prompt_ids=[*shared, 901])
    assert two.of(home) == {"first", "second"}
    for number in range(30):
        two.enqueue(f"r{number}", prompt_ids=[*shared, number])
    assert two.of("a")
    assert two.of("b")


def test_a_lost_sidecars_requests_move_at_the_next_poll_with_their_output(two: Fleet) -> None:
    two.enqueue(*(f"r{number}" for number in range(SOME)))
    lost, other = two.links["a"], two.links["b"]
    moved = two.of("a")
    for rid in moved:
        two.active.admit(rid)
        two.active.propose([rid], [[8, 300]], 4)
    submitted = len(other.submits)
    lost.die()
    two.active.poll()
    assert two.of("b") == {f"r{number}" for number in range(SOME)}
    later = other.submits[submitted:]
    assert len(later) == len(moved)
    assert {tuple(submit.token_ids[-2:]) for submit in later} == {(8, 300)}
    assert {submit.base_len for submit in later} == {2}
    assert {admit.submission for admit in other.admits} >= {submit.submission for submit in later}
    poll(two.active)
    assert tree_of(two.active, min(moved), [8, 300], 4).token_ids == (300, 301, 302, 303)
    assert two.active.describe()["handovers"] == len(moved)
    two.check()


def test_a_poll_moves_a_lost_sidecars_requests_only_for_a_limited_time() -> None:
    fleet = Fleet("a", "b", tick_s=HANDOVER_S / 4)
    rids = [f"r{number}" for number in range(10 * SOME)]
    fleet.enqueue(*rids)
    left = len(fleet.of("a"))
    fleet.links["a"].die()
    fleet.active.poll()
    assert 0 < len(fleet.of("a")) < left
    poll(fleet.active, len(rids))
    assert not fleet.of("a")
    assert len(fleet.of("b")) == len(rids)
    assert fleet.active.describe()["handovers"] == left
    fleet.check()


def test_a_poll_reads_no_further_sidecar_after_its_time() -> None:
    """A tick is the whole time of a poll, so each poll reads one sidecar, and all take turns."""
    fleet = Fleet("a", "b", "c", tick_s=POLL_BUDGET_S)
    before = {endpoint: link._polls for endpoint, link in fleet.links.items()}
    for read in range(1, 7):
        fleet.active.sidecar.receive()
        polls = [link._polls - before[endpoint] for endpoint, link in fleet.links.items()]
        assert sum(polls) == read
        assert max(polls) - min(polls) <= 1


def test_requests_do_not_move_back_but_new_ones_go_to_the_sidecar_that_is_back(two: Fleet) -> None:
    two.enqueue(*(f"r{number}" for number in range(SOME)))
    two.links["a"].die()
    poll(two.active)
    before = two.active.sidecar.session_count
    two.links["a"].revive()
    poll(two.active)
    assert two.active.sidecar.session_count == before + 1
    assert not two.of("a")
    two.enqueue(*(f"s{number}" for number in range(SOME)))
    assert two.of("a")
    assert len(two.of("b")) >= SOME
    two.check()


def test_late_drafts_of_the_former_sidecar_reach_no_tree(two: Fleet) -> None:
    two.enqueue("x")
    home = "a" if two.of("a") else "b"
    former = two.links[home]
    submission = former.submits[0].submission
    two.active.admit("x")
    former.die()
    poll(two.active)
    former.revive()
    poll(two.active)
    foreign = list(range(700, 710))
    former.inject(Drafted(submission, 0, 0, 0, foreign, True))
    former.inject(Declined(submission, "late"))
    poll(two.active)
    tree = tree_of(two.active, "x", [8], 8)
    assert not set(tree.token_ids) & set(foreign)
    assert two.active.describe()["declined_requests"] == 0
    two.check()


def test_a_sidecar_may_use_the_numbers_of_its_own_submissions_only(two: Fleet) -> None:
    two.enqueue("x")
    home, other = ("a", "b") if two.of("a") else ("b", "a")
    submission = two.links[home].submits[0].submission
    two.links[other].inject(Drafted(submission, 0, 0, 0, [700, 701], True))
    poll(two.active)
    assert not {700, 701} & set(tree_of(two.active, "x", [8], 8).token_ids)


def test_a_request_that_one_sidecar_declined_is_asked_of_the_next(two: Fleet) -> None:
    two.enqueue("x")
    home, other = ("a", "b") if two.of("a") else ("b", "a")
    two.links[home].inject(Declined(two.links[home].submits[0].submission, "too long"))
    poll(two.active)
    assert not two.links[other].submits
    two.links[home].die()
    poll(two.active)
    assert len(two.links[other].submits) == 1
    two.check()


def test_without_any_connected_sidecar_requests_wait_for_the_first_one() -> None:
    fleet = Fleet("a", "b", "c", ready=False)
    fleet.links["a"].refuse("another tokenizer")
    rids = [f"r{number}" for number in range(SOME)]
    fleet.enqueue(*rids)
    assert not fleet.active.sidecar.ready
    assert fleet.active.sidecar.may_come
    assert fleet.active.describe()["sidecar"] == "connecting"
    assert not fleet.of("a"), "a sidecar that refuses the server gets nothing"
    fleet.links["b"].revive()
    poll(fleet.active)
    assert fleet.of("b") == set(rids)
    assert len(fleet.links["b"].submits) == SOME
    fleet.check()


def test_one_of_several_sidecars_that_refuses_is_left_out(two: Fleet) -> None:
    two.links["a"].refuse("another tokenizer")
    two.enqueue(*(f"r{number}" for number in range(SOME)))
    assert not two.of("a")
    assert two.active.describe()["sidecar"] == "ready"


def test_an_endpoint_can_be_added_and_removed(two: Fleet) -> None:
    rids = {f"r{number}" for number in range(SOME)}
    two.enqueue(*sorted(rids))
    sidecars = two.active.sidecar
    sessions = sidecars.session_count
    sidecars.change(["b", "c"])
    assert two.links["a"]._closed
    assert sidecars.endpoints == ("b", "c")
    assert two.of("b") | two.of("c") == rids
    poll(two.active)
    assert len(two.links["b"].submits) >= len(two.of("b"))
    two.check()
    two.enqueue(*(f"s{number}" for number in range(SOME)))
    assert two.of("c"), "the new sidecar gets new requests"
    assert sidecars.session_count > sessions
    assert [client.number for client in sidecars._clients] == [1, 0]
    two.check()


def test_all_endpoints_can_be_removed_and_one_added_again(two: Fleet) -> None:
    two.enqueue("x")
    two.active.sidecar.change([])
    poll(two.active)
    assert two.active.describe()["sidecar"] == "none"
    assert not two.active.sidecar.ready
    two.enqueue("y")
    two.active.admit("y")
    assert tree_of(two.active, "y", [8], 4).token_ids[0] == 8
    two.check()
    two.active.end("y")
    two.active.sidecar.change(["c"])
    poll(two.active)
    assert two.of("c") == {"x"}
    two.check()


def test_an_endpoint_that_cannot_be_opened_is_left_out(
    two: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        two.active.sidecar.change(["b", "bad"])
    assert two.active.sidecar.endpoints == ("b",)
    assert "the endpoint is 'bad'" in caplog.text


def test_counts_do_not_decrease_when_a_sidecar_is_removed(two: Fleet) -> None:
    two.enqueue("x")
    home = "a" if two.of("a") else "b"
    two.links[home].inject(Declined(two.links[home].submits[0].submission, "too long"))
    two.links[home].inject_frame(b"?")
    poll(two.active)
    before = two.active.describe()
    assert before["declined_requests"] == before["dropped_messages"]["malformed"] == 1
    two.active.sidecar.change([endpoint for endpoint in "ab" if endpoint != home])
    after = two.active.describe()
    assert after["declined_requests"] == after["dropped_messages"]["malformed"] == 1


def test_speculation_that_is_turned_off_and_on_reaches_all_sidecars(two: Fleet) -> None:
    two.enqueue(*(f"r{number}" for number in range(SOME)))
    two.active.change_setting("qspec_enabled", 0)
    assert not two.active.sidecar.wanted
    assert sum(len(link.closes) for link in two.links.values()) == SOME
    two.active.sidecar.change(["a", "b", "c"])
    poll(two.active)
    assert not two.active.sidecar.wanted
    two.active.change_setting("qspec_enabled", 1)
    poll(two.active)
    assert sum(len(link.submits) for link in two.links.values()) == 2 * SOME
    two.check()


def test_server_info_lists_each_sidecar(two: Fleet) -> None:
    two.enqueue(*(f"r{number}" for number in range(SOME)))
    for link, texts in zip(two.links.values(), (3, 4), strict=True):
        link.inject(Heartbeat(2, 1, 50, 1, texts=texts))
    poll(two.active)
    described = two.active.describe()
    listed = described["sidecars"]
    assert [each["endpoint"] for each in listed] == ["a", "b"]
    assert [each["number"] for each in listed] == [0, 1]
    assert sum(each["requests"] for each in listed) == SOME
    assert described["sidecar_texts"] == 7
    assert described["drafted_tokens"] == 100
    assert described["drafting_requests"] == 4
    two.links["a"].die()
    poll(two.active)
    described = two.active.describe()
    assert [each["state"] for each in described["sidecars"]] == ["lost", "ready"]
    assert described["sidecar"] == "ready"
    assert described["sidecar_texts"] == 4
    assert described["drafted_tokens"] == 100


def test_step_times_are_those_of_the_slowest_connected_sidecar(two: Fleet) -> None:
    for link, seconds in zip(two.links.values(), (0.01, 0.03), strict=True):
        link.inject(Heartbeat(0, 0, 0, 0, step_times=[(1.0, seconds)]))
    poll(two.active)
    assert two.active.sidecar.step_times == [(2.0, 0.03)]
    two.links["b"].die()
    poll(two.active)
    assert two.active.sidecar.step_times == [(1.0, 0.01)]


def test_prompts_are_read_by_all_connected_sidecars(two: Fleet) -> None:
    assert two.active.sidecar.read_seconds == 0.0
    for link, seconds in zip(two.links.values(), (0.001, 0.003), strict=True):
        link.inject(Heartbeat(0, 0, 0, 0, read_seconds=seconds))
    poll(two.active)
    assert two.active.sidecar.read_seconds == 0.0015
    two.links["b"].die()
    poll(two.active)
    assert two.active.sidecar.read_seconds == 0.001
