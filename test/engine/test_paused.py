"""What the sidecar is asked, and what is proposed, while sources are paused."""

import pytest

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Drafted
from sglang_qspec.policy.sources import FEWEST_TOKENS, FIRST_PAUSE_S
from sglang_qspec.trie import Source
from test.engine.sidecar.test_commit_reporter import commits, decode
from test.engine.test_speculator import (
    VOCAB,
    Clock,
    counting,
    enqueue,
    make,
    poll,
    tree_of,
)


@pytest.fixture
def link() -> FakeSidecarLink:
    return FakeSidecarLink(counting, vocab_size=VOCAB)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def active(link: FakeSidecarLink, clock: Clock) -> Speculator:
    """One request, "a", that is served and has drafts."""
    active = make(link, clock)
    poll(active)
    enqueue(active)
    poll(active)
    active.admit("a")
    return active


def pause(active: Speculator, *sources: Source) -> None:
    for source in sources:
        active.sources.observe(source, FEWEST_TOKENS, 0, cost=1.0)
    poll(active)


def test_a_paused_source_is_not_proposed_and_is_again_after_its_pause(
    active: Speculator, clock: Clock
) -> None:
    assert len(tree_of(active, "a", [8], 4)) == 4
    pause(active, Source.QUEUE)
    assert len(tree_of(active, "a", [8], 4)) == 1
    clock.now += FIRST_PAUSE_S
    assert len(tree_of(active, "a", [8], 4)) == 4


def test_a_request_is_drafted_for_from_its_first_step_on_and_not_while_steps_are_paused(
    active: Speculator, link: FakeSidecarLink, clock: Clock
) -> None:
    assert active.sidecar.stepping(["a", "unknown"]) == 0
    link.inject(Drafted(link.submits[0].submission, MAX_COMPLETIONS, 0, 0, [9]))
    poll(active)
    assert active.sidecar.stepping(["a", "unknown"]) == 1
    pause(active, Source.STEP)
    assert active.sidecar.stepping(["a", "unknown"]) == 0
    clock.now += FIRST_PAUSE_S
    assert active.sidecar.stepping(["a", "unknown"]) == 1


def test_while_steps_are_paused_nothing_is_reported_and_then_all_that_was_missed(
    active: Speculator, link: FakeSidecarLink, clock: Clock
) -> None:
    pause(active, Source.STEP)
    output = decode(active, [8], [], 300)
    output = decode(active, output, [], 301)
    assert commits(link) == []
    clock.now += FIRST_PAUSE_S
    poll(active)
    decode(active, output, [], 302)
    assert [commit.token_ids for commit in commits(link)] == [[8, 300, 301], [302]]


def test_while_queue_drafts_are_paused_a_request_asks_for_steps_alone(
    active: Speculator, link: FakeSidecarLink
) -> None:
    pause(active, Source.QUEUE)
    enqueue(active, "b")
    assert [submit.completions for submit in link.submits] == [8, 0]


def test_a_sidecar_whose_drafts_are_all_paused_is_left_alone_and_asked_anew(
    active: Speculator, link: FakeSidecarLink, clock: Clock
) -> None:
    pause(active, Source.QUEUE, Source.STEP)
    assert [close.submission for close in link.closes] == [1]
    enqueue(active, "b")
    decode(active, [8], [], 300)
    assert [submit.submission for submit in link.submits] == [1]
    assert commits(link) == []
    clock.now += FIRST_PAUSE_S
    poll(active)
    assert [submit.base_len for submit in link.submits[1:]] == [2, 0]
    assert len({submit.submission for submit in link.submits}) == 3
    active.check_integrity()


def test_what_a_source_costs_and_saves_is_described(active: Speculator) -> None:
    pause(active, Source.GUESS)
    described = active.describe()["sources"]
    assert described["guess"]["paused"] is True
    assert described["prompt"]["paused"] is False
