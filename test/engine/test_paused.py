"""A paused draft source is not proposed, and the sidecar is not asked to draft for it."""

import pytest

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Drafted
from sglang_qspec.policy.sources import FEWEST_TOKENS, FIRST_PAUSE_S
from sglang_qspec.trie import Source
from test.engine.simulation import Clock
from test.engine.speculating import commits, decode, enqueue, poll, serve, tree_of


@pytest.fixture
def active(link: FakeSidecarLink, clock: Clock) -> Speculator:
    """A speculator with one running request, "a", which has drafts."""
    return serve(link, clock)


def pause(active: Speculator, *sources: Source) -> None:
    for source in sources:
        active.sources.observe(source, FEWEST_TOKENS, 0, cost=1.0)
    poll(active)


def test_a_paused_source_is_not_proposed_until_its_pause_ends(
    active: Speculator, clock: Clock
) -> None:
    assert len(tree_of(active, "a", [8], 4)) == 4
    pause(active, Source.QUEUE)
    assert len(tree_of(active, "a", [8], 4)) == 1
    clock.now += FIRST_PAUSE_S
    assert len(tree_of(active, "a", [8], 4)) == 4


def test_a_request_counts_as_stepping_after_its_first_step_draft_unless_steps_are_paused(
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


def test_tokens_committed_while_steps_are_paused_are_reported_after_the_pause(
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


def test_while_queue_drafts_are_paused_a_request_asks_for_steps_only(
    active: Speculator, link: FakeSidecarLink
) -> None:
    pause(active, Source.QUEUE)
    enqueue(active, "b")
    assert [submit.completions for submit in link.submits] == [8, 0]


def test_while_all_its_drafts_are_paused_a_sidecar_has_no_submissions(
    active: Speculator, link: FakeSidecarLink, clock: Clock
) -> None:
    assert active.sidecar.wanted
    pause(active, Source.QUEUE, Source.STEP)
    assert [close.submission for close in link.closes] == [1]
    assert not active.sidecar.wanted
    enqueue(active, "b")
    decode(active, [8], [], 300)
    assert [submit.submission for submit in link.submits] == [1]
    assert commits(link) == []
    clock.now += FIRST_PAUSE_S
    poll(active)
    assert [submit.base_len for submit in link.submits[1:]] == [2, 0]
    assert len({submit.submission for submit in link.submits}) == 3
    assert active.sidecar.wanted
    active.check_integrity()


def test_the_description_says_which_sources_are_paused(active: Speculator) -> None:
    pause(active, Source.GUESS)
    described = active.describe()["sources"]
    assert described["guess"]["paused"] is True
    assert described["prompt"]["paused"] is False
