"""What the sidecar is told of requests that leave their drafts, and what becomes of redrafts."""

from collections.abc import Sequence
from typing import Any

import pytest
from sglang_qspec.engine.strays import INTERVAL_S, MAX_TOKENS

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Commit, Drafted
from sglang_qspec.trie import Source
from test.engine.test_speculator import VOCAB, Clock, counting, enqueue, make, poll, tree_of

OUTPUT = [8, 100]
"""It begins as the completion, 8, 9, 10, ..., and leaves it at once."""


@pytest.fixture
def link() -> FakeSidecarLink:
    return FakeSidecarLink(counting, vocab_size=VOCAB)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def serve(link: FakeSidecarLink, clock: Clock, **settings: Any) -> Speculator:
    """One request, "a", that is served and has drafts."""
    active = make(link, clock, **settings)
    poll(active)
    enqueue(active)
    poll(active)
    active.admit("a")
    return active


def decode(active: Speculator, output_ids: list[int], accepted: Sequence[int] = ()) -> None:
    """One pass behind `output_ids` that accepts these nodes of its tree."""
    trees = active.propose(["a"], [output_ids], 4)
    active.settle(["a"], trees, [list(accepted)])


def commits(link: FakeSidecarLink) -> list[Commit]:
    return [commit for message in link.commits for commit in message.requests]


def test_a_request_whose_pass_accepted_no_draft_is_reported_with_all_it_has_committed(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    decode(active, OUTPUT[:1])
    decode(active, OUTPUT)
    serial = link.submits[0].serial
    assert commits(link) == [Commit("a", serial, 0, OUTPUT, 28)]


def test_a_request_that_follows_its_drafts_is_not_reported(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    decode(active, [8], [1, 2])
    decode(active, [8, 9, 10, 11], [1])
    decode(active, [8, 9, 10, 11, 12, 13])
    assert link.commits == []


def test_reports_are_rare_and_none_says_again_what_another_said(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    output = list(OUTPUT)
    decode(active, output)
    for token in range(200, 210):
        output.append(token)
        decode(active, output)
    assert len(link.commits) == 1
    clock.now += INTERVAL_S
    decode(active, [*output, 300])
    first, second = commits(link)
    assert first.base_len == 0
    assert second.base_len == len(first.token_ids)
    assert first.token_ids + second.token_ids == [*output, 300]


def test_what_a_full_queue_did_not_take_is_said_in_the_next_report(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    decode(active, OUTPUT)
    link.queue_full = True
    decode(active, [*OUTPUT, 200])
    link.queue_full = False
    clock.now += INTERVAL_S
    decode(active, [*OUTPUT, 200, 201])
    assert [commit.token_ids for commit in commits(link)] == [[*OUTPUT, 200, 201]]


def test_a_report_is_bounded(link: FakeSidecarLink, clock: Clock) -> None:
    active = make(link, clock)
    poll(active)
    rids = ["a", "b", "c"]
    output = [8, *(500 + number % 100 for number in range(MAX_TOKENS // 2))]
    for rid in rids:
        enqueue(active, rid, max_new_tokens=10_000)
    for _ in range(2):
        trees = active.propose(rids, [output] * 3, 4)
        active.settle(rids, trees, [[], [], []])
    assert [commit.rid for commit in commits(link)] == ["a", "b"]


@pytest.mark.parametrize("settings", [{"redraft": "never"}, {"on_admission": "stop"}])
def test_nothing_is_reported_where_no_redraft_is_wanted(
    link: FakeSidecarLink, clock: Clock, settings: dict[str, str]
) -> None:
    active = serve(link, clock, **settings)
    for end in range(1, 5):
        decode(active, [8, 100, 101, 102, 103][:end])
    assert link.commits == []


def test_nothing_is_reported_of_a_request_that_has_ended_or_is_new_to_the_sidecar(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    decode(active, OUTPUT)
    active.end("a")
    active.propose([], [], 4)
    enqueue(active)
    decode(active, [8])
    link.die()
    poll(active)
    link.revive()
    poll(active)
    decode(active, [8])
    assert link.commits == []
    decode(active, OUTPUT)
    decode(active, [*OUTPUT, 101])
    assert [commit.serial for commit in commits(link)] == [link.submits[-1].serial]


def test_a_redraft_is_proposed_from_where_it_begins_and_beside_other_drafts(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    decode(active, OUTPUT)
    decode(active, [*OUTPUT, 101])
    (commit,) = commits(link)
    for number, token_ids in enumerate(([300, 301], [400, 401])):
        link.inject(
            Drafted("a", commit.serial, MAX_COMPLETIONS + number, 3, 0, token_ids, finished=True)
        )
    poll(active)
    tree = tree_of(active, "a", [*OUTPUT, 101], 6)
    assert {300, 301, 400, 401} <= set(tree.token_ids)
    assert set(tree.sources[1:]) == {Source.QUEUE}
    assert active.describe()["requests_in_flight"] == 1  # as far as its completions are concerned
    active.check_integrity()
