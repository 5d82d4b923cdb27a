"""The sidecar gets the right commits, and passes use and await the step drafts for them."""

import numpy as np
import pytest

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.engine.sidecar.commit_reporter import MAX_TOKENS, TRY_AFTER
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import MAX_COMMIT_TOKENS, Commit, Drafted
from sglang_qspec.policy import FirstTokens
from sglang_qspec.trie import DraftTree, DraftTrees, Source
from test.engine.simulation import Clock
from test.engine.speculating import (
    commits,
    connect,
    decode,
    enqueue,
    poll,
    replace_sidecar,
    serve,
    tree_of,
)

OUTPUT = [8, 100]
"""An output that diverges from the completion 8, 9, 10, ... at its second token."""


def test_each_committed_token_is_reported_at_once_and_only_once(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock, step_tokens=6)
    output = decode(active, [8], [1, 2], 300)
    output = decode(active, output, [], 301)
    submission = link.submits[0].submission
    assert output == [8, 9, 10, 300, 301]
    assert commits(link) == [
        Commit(submission, 0, [8], 6),  # from prefill
        Commit(submission, 1, [9, 10, 300], 6),
        Commit(submission, 4, [301], 6),
    ]


def judge(active: Speculator, right: bool, times: int) -> None:
    """Report for `times` passes that the draft for request "a" is right, or wrong."""
    tree = DraftTree((5, 6), (0, 0), (Source.STEP,) * 2, (1.0, 0.9))
    offered = DraftTrees.of([tree], 2)
    first = FirstTokens.of(offered, np.array([6 if right else 7], np.int32))
    for _ in range(times):
        active.update_credit(["a"], offered, first)


def test_a_request_with_wrong_drafts_asks_for_steps_less_often(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    enqueue(active, max_new_tokens=200)
    active.admit("a")
    judge(active, right=False, times=30)
    output = [8]
    for token in range(100, 100 + 2 * TRY_AFTER):
        output = decode(active, output, [], token)
    assert [len(commit.token_ids) for commit in commits(link)] == [TRY_AFTER] * 2
    judge(active, right=True, times=100)
    output = decode(active, output, [], 500)
    decode(active, output, [], 501)
    assert sum(len(commit.token_ids) for commit in commits(link)) == len(output) + 1
    assert commits(link)[-1].token_ids == [501]


def test_near_its_end_a_request_asks_for_no_more_tokens_than_are_left(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock, step_tokens=6)
    decode(active, [8, *range(100, 124)], [], 124)
    decode(active, [8, *range(100, 129)], [], 129)
    assert [commit.max_new_tokens for commit in commits(link)] == [5, 4]


def test_tokens_that_a_full_queue_did_not_take_are_in_the_next_report(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    link.queue_full = True
    output = decode(active, OUTPUT, [], 200)
    link.queue_full = False
    decode(active, output, [], 201)
    assert [commit.token_ids for commit in commits(link)] == [[*OUTPUT, 200], [201]]


def test_a_report_is_bounded(link: FakeSidecarLink, clock: Clock) -> None:
    active = connect(link, clock)
    rids = ["a", "b", "c"]
    output = [8, *(500 + number % 100 for number in range(MAX_COMMIT_TOKENS + 50))]
    for rid in rids:
        enqueue(active, rid, max_new_tokens=10_000)
    first, second, third = (submit.submission for submit in link.submits)
    for _ in range(3):
        active.propose(rids, [output] * 3, 4)
    assert MAX_TOKENS == 2 * MAX_COMMIT_TOKENS
    assert [(commit.submission, len(commit.token_ids)) for commit in commits(link)] == [
        (first, MAX_COMMIT_TOKENS),
        (second, MAX_COMMIT_TOKENS),
        (third, MAX_COMMIT_TOKENS),  # not in the first report
        (first, 51),
        (second, 51),
        (third, 51),
    ]


@pytest.mark.parametrize("settings", [{"mode": "queue"}, {"on_admission": "stop"}])
def test_nothing_is_reported_if_no_steps_are_wanted(
    link: FakeSidecarLink, clock: Clock, settings: dict[str, str]
) -> None:
    active = serve(link, clock, **settings)
    decode(active, decode(active, OUTPUT))
    assert link.commits == []


def test_one_request_may_refuse_steps_and_another_ask_for_steps_alone(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = connect(link, clock)
    enqueue(active, "a", custom_params={"qspec_sources": ["queue", "prompt"]})
    enqueue(active, "b", custom_params={"qspec_sources": ["step"]})
    assert [submit.completions for submit in link.submits] == [8, 0]
    active.propose(["a", "b"], [[8], [8]], 4)
    assert [commit.submission for commit in commits(link)] == [link.submits[1].submission]


def test_neither_an_ended_request_nor_tokens_in_a_submission_are_reported(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    active.end("a")
    decode(active, OUTPUT)
    assert link.commits == []
    enqueue(active)
    output = decode(active, [8])
    replace_sidecar(active, link)
    reported = len(commits(link))
    output = decode(active, output, [], 300)
    resubmitted = link.submits[-1]
    assert [(c.submission, c.token_ids) for c in commits(link)[reported:]] == [
        (resubmitted.submission, [300])
    ]


def test_step_drafts_are_proposed_where_they_begin_beside_each_other(
    link: FakeSidecarLink, clock: Clock
) -> None:
    active = serve(link, clock)
    output = decode(active, OUTPUT, [], 101)
    submission = commits(link)[-1].submission
    for number, token_ids in enumerate(([300, 301], [400, 401])):
        link.inject(Drafted(submission, MAX_COMPLETIONS + number, 3, 0, token_ids, finished=True))
    poll(active)
    tree = tree_of(active, "a", output, 6)
    assert {300, 301, 400, 401} <= set(tree.token_ids)
    assert set(tree.sources[1:]) == {Source.STEP}
    assert active.describe()["requests_in_flight"] == 1  # its completions are not finished
    active.check_integrity()


def test_a_pass_awaits_steps_only_after_the_first_step_draft_of_a_request(
    link: FakeSidecarLink,
) -> None:
    active = connect(link, step_tokens=1)
    for rid in "ab":
        enqueue(active, rid, custom_params={"qspec_sources": ["step"]})

    def awaited(*rids: str) -> list[bool]:
        trees = active.propose(rids, [[8] for _ in rids], 8)
        answer: list[bool] = active.awaited(rids, trees).tolist()
        return answer

    assert awaited("a", "b") == [False, False]  # the sidecar may not have read their prompts yet
    a, b = (submit.submission for submit in link.submits)
    assert not active.wait_for_steps(0.001)
    link.inject(Drafted(a, MAX_COMPLETIONS, 1, 0, [20]))
    assert active.wait_for_steps(1.0)
    assert awaited("a", "b") == [True, False]
    assert awaited("a", "unknown") == [True, False]
    link.inject(Drafted(a, MAX_COMPLETIONS, 1, 1, [21], finished=True, known_len=1))
    link.inject(Drafted(b, MAX_COMPLETIONS, 1, 0, [30]))
    assert active.wait_for_steps(1.0)
    assert awaited("a", "b") == [False, True]  # the draft of "a" has paused
    active.propose(["a"], [[8, 20]], 8)
    trees = active.propose(["a", "b"], [[8, 20], [8]], 8)
    assert active.awaited(["a", "b"], trees).all()  # the commit makes it continue
    link.inject(Drafted(a, MAX_COMPLETIONS, 1, 2, [], finished=True, known_len=1))
    poll(active)
    assert active.awaited(["a", "b"], trees).all()  # sent before the sidecar knew of the commit
    full = active.propose(["a", "b"], [[8, 20], [8]], 2)
    assert active.awaited(["a", "b"], full).all()  # lookahead 1: passes are made for drafts
    active.sidecar.lookahead = 8
    assert not active.awaited(["a", "b"], full).any()  # step drafts run ahead of the pass
    link.die()
    poll(active)
    active.sidecar.lookahead = 8
    assert not active.awaited(["a", "b"], trees).any()
    assert not active.wait_for_steps(0.001)
