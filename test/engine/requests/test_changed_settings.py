"""Runtime settings that change while requests are live, and requests with narrower trees."""

import pytest

from sglang_qspec.config import MODES
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.trie import Source
from test.engine.speculating import enqueue, poll, replace_sidecar, tree_of


@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_tree_is_no_wider_than_its_request_asks(
    active: Speculator, link: FakeSidecarLink, most: int
) -> None:
    enqueue(active, "narrow", custom_params={"qspec_draft_token_num": most})
    enqueue(active, "wide")
    poll(active)
    trees = active.propose(["narrow", "wide"], [[8], [8]], 6)
    assert trees.sizes.tolist() == [min(most, 6), 6]
    assert (trees.scores[0] > 0).sum() == min(most, 6)  # the policy chooses the width by the scores
    assert len(link.submits) == (1 if most == 1 else 2)
    active.drop_drafts()
    assert len(tree_of(active, "narrow", [8], 6)) <= most
    active.check_integrity()


def test_a_pass_does_not_wait_for_drafts_beyond_a_full_narrow_tree(active: Speculator) -> None:
    enqueue(active, "a", custom_params={"qspec_draft_token_num": 3})
    poll(active)
    trees = active.propose(["a"], [[8]], 6)
    live = active._live["a"]
    assert live.drafting.submission is not None
    live.drafting.submission.has_steps = True
    assert active.sidecar.awaits(live)
    assert not active.awaited(["a"], trees).any()
    assert active.awaited(["a"], active.propose(["a"], [[8]], 2)).any() == (
        active.sidecar.lookahead < 2
    )


def test_switching_off_closes_live_submissions_and_makes_no_more(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active, "a")
    active.change_setting("qspec_enabled", 0)
    assert [close.submission for close in link.closes] == [1]
    enqueue(active, "b")
    poll(active)
    assert [submit.submission for submit in link.submits] == [1]
    assert active.end("b") is None
    active.check_integrity()


def test_switching_on_submits_live_requests_with_their_current_output(
    active: Speculator, link: FakeSidecarLink
) -> None:
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
    active.change_setting("qspec_enabled", 1)  # it is on already: no second submission
    assert len(link.submits) == 2
    active.check_integrity()


def test_a_new_sidecar_gets_no_submission_while_speculation_is_off(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active, "a")
    active.change_setting("qspec_enabled", 0)
    submitted = len(link.submits)
    replace_sidecar(active, link)
    assert active.sidecar.ready
    assert len(link.submits) == submitted


def test_completions_and_sources_apply_to_requests_that_come_later(
    active: Speculator, link: FakeSidecarLink
) -> None:
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


def test_a_request_for_step_drafts_alone_is_submitted_during_rounds_without_them(
    active: Speculator, link: FakeSidecarLink
) -> None:
    active.sidecar.lookahead = 0  # otherwise no round would ever have step drafts again
    enqueue(active, "a", custom_params={"qspec_sources": ["step"]})
    assert [submit.completions for submit in link.submits] == [0]
    assert active.sidecar.wanted


def test_a_mode_without_step_drafts_ends_submissions_that_ask_for_nothing_else(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active, "a", custom_params={"qspec_sources": ["step"]})
    enqueue(active, "b")
    active.change_setting("qspec_mode", MODES.index("queue"))
    assert [close.submission for close in link.closes] == [1]
    enqueue(active, "c", custom_params={"qspec_sources": ["step"]})
    assert len(link.submits) == 2
    active.change_setting("qspec_mode", MODES.index("auto"))
    poll(active)
    assert [submit.completions for submit in link.submits[2:]] == [0, 0]
    active.check_integrity()
