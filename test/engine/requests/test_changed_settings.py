"""What a speculator does when a knob is turned, and for requests that want narrower trees."""

import pytest

from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.trie import Source
from test.engine.test_speculator import counting, enqueue, make, poll, tree_of

VOCAB = 1000


@pytest.fixture
def link() -> FakeSidecarLink:
    return FakeSidecarLink(counting, vocab_size=VOCAB)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_request_s_tree_is_no_wider_than_it_wants(link: FakeSidecarLink, most: int) -> None:
    active = make(link)
    poll(active)
    enqueue(active, "narrow", custom_params={"qspec_draft_token_num": most})
    enqueue(active, "wide")
    poll(active)
    trees = active.propose(["narrow", "wide"], [[8], [8]], 6)
    assert trees.sizes.tolist() == [min(most, 6), 6]
    assert (trees.scores[0] > 0).sum() == min(most, 6)  # what the width of a pass is chosen by
    assert len(link.submits) == (1 if most == 1 else 2)
    active.drop_drafts()
    assert len(tree_of(active, "narrow", [8], 6)) <= most
    active.check_integrity()


def test_a_full_narrow_tree_awaits_no_more(link: FakeSidecarLink) -> None:
    active = make(link)
    poll(active)
    enqueue(active, "a", custom_params={"qspec_draft_token_num": 3})
    poll(active)
    trees = active.propose(["a"], [[8]], 6)
    live = active._live["a"]
    live.drafting.has_steps = True
    assert active.sidecar.awaits(live)
    assert not active.awaited(["a"], trees).any()
    assert active.awaited(["a"], active.propose(["a"], [[8]], 2)).any() == (
        active.sidecar.lookahead < 2
    )


def test_switched_off_all_that_is_live_is_let_go_and_nothing_is_asked_for(
    link: FakeSidecarLink,
) -> None:
    active = make(link)
    poll(active)
    enqueue(active, "a")
    active.change_setting("qspec_enabled", 0)
    assert [close.submission for close in link.closes] == [1]
    enqueue(active, "b")
    poll(active)
    assert [submit.submission for submit in link.submits] == [1]
    assert active.end("b") is None
    active.check_integrity()


def test_switched_on_again_what_is_live_is_asked_for_from_what_it_has_by_then(
    link: FakeSidecarLink,
) -> None:
    active = make(link)
    poll(active)
    enqueue(active, "a")
    active.change_setting("qspec_enabled", 0)
    active.propose(["a"], [[8, 9]], 1, drafts=False)
    active.change_setting("qspec_enabled", 1)
    poll(active)
    first, second = link.submits
    assert (second.token_ids, second.base_len) == ([5, 6, 7, 8, 9], 2)
    assert second.submission > first.submission
    tree = tree_of(active, "a", [8, 9], 4)
    assert tree.token_ids == (9, 10, 11, 12)
    active.change_setting("qspec_enabled", 1)  # it is on: nothing is asked for twice
    assert len(link.submits) == 2
    active.check_integrity()


def test_a_new_sidecar_of_a_server_that_is_switched_off_is_asked_for_nothing(
    link: FakeSidecarLink,
) -> None:
    active = make(link)
    poll(active)
    enqueue(active, "a")
    active.change_setting("qspec_enabled", 0)
    asked = len(link.submits)
    link.die()
    poll(active)
    link.revive()
    poll(active)
    assert active.sidecar.ready
    assert len(link.submits) == asked


def test_completions_and_sources_are_those_of_requests_that_come_from_then_on(
    link: FakeSidecarLink,
) -> None:
    active = make(link)
    poll(active)
    enqueue(active, "before")
    active.change_setting("qspec_completions", 2)
    enqueue(active, "fewer")
    active.change_setting("qspec_source_queue", 0)
    active.change_setting("qspec_source_step", 0)
    enqueue(active, "own text", prompt_ids=[5, 6, 7, 5])
    assert [submit.completions for submit in link.submits] == [8, 2]
    poll(active)
    assert tree_of(active, "before", [8], 3).sources[1:] == (Source.QUEUE,) * 2
    assert tree_of(active, "own text", [6], 3).sources[1:] == (Source.PROMPT,) * 2
