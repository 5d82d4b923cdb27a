"""A sidecar that follows the protocol and drafts only wrong tokens."""

from __future__ import annotations

from benchmark.worst.wrong_sidecar import LONGEST_COMPLETION, Guesser
from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import Close, Commit, Commits, Submit

PEER = Peer("server", b"1")


def test_completions_come_whole() -> None:
    drafts = Guesser(1000).handle(PEER, Submit(1, [5, 6], 0, 500, 3, 0.6))
    assert [(draft.completion, draft.base_len, draft.start) for draft in drafts] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
    ]
    assert all(len(draft.token_ids) == LONGEST_COMPLETION for draft in drafts)
    assert all(draft.finished for draft in drafts)


def test_step_drafts_are_sent_one_token_at_a_time_up_to_the_requested_length() -> None:
    guesser = Guesser(1000)
    guesser.handle(PEER, Commits([Commit(1, 4, [7, 8], 3)]))
    drafts = [draft for _ in range(9) for _, draft in guesser.step()]
    assert [(draft.base_len, draft.start, len(draft.token_ids)) for draft in drafts] == [
        (6, 0, 1),
        (6, 1, 1),
        (6, 2, 1),
    ]
    assert [draft.finished for draft in drafts] == [False, False, True]
    assert {draft.known_len for draft in drafts} == {6}
    assert {draft.completion for draft in drafts} == {MAX_COMPLETIONS + 1}


def test_a_commit_replaces_the_last_one_and_a_close_ends_the_draft() -> None:
    guesser = Guesser(1000)
    guesser.handle(PEER, Commits([Commit(1, 0, [7], 9), Commit(2, 0, [7], 9)]))
    guesser.handle(PEER, Commits([Commit(1, 1, [7], 9)]))
    assert [(draft.submission, draft.base_len) for _, draft in guesser.step()] == [(1, 2), (2, 1)]
    guesser.handle(PEER, Close(2))
    assert [draft.submission for _, draft in guesser.step()] == [1]
