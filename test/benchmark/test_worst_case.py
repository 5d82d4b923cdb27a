"""The cases, the misleading guesses, and the sidecar that drafts only wrong tokens."""

from __future__ import annotations

from pathlib import Path

from benchmark.bench_worst_case import configuration
from benchmark.harness.cells import Cell
from benchmark.harness.configuration import Configuration, Settings
from benchmark.worst.cases import CASES, GUESSES, RANDOM, SIDECAR, SPEC_BENCH, cells_of
from benchmark.worst.loads import GUESS_TOKENS, misleading
from benchmark.worst.wrong_sidecar import LONGEST_COMPLETION, Guesser
from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import Peer
from sglang_qspec.messages import Close, Commit, Commits, Submit


def test_passes_of_one_width_are_compared_on_spec_bench_alone() -> None:
    cells = cells_of([case.name for case in CASES], [1, 8], [2, 16], 1)
    for case in CASES:
        configs = [
            cell.config for cell in cells if (cell["case"], cell["in_flight"]) == (case.name, 8)
        ]
        fixed = ["one-width", "width-2", "width-16"] if case.name == SPEC_BENCH else []
        assert configs == ["none", "adaptive", *fixed]


def test_all_but_the_misled_sidecar_share_a_server_and_target_cores_are_the_same() -> None:
    settings = Settings(Path("target"), Path("draft"), "bfloat16", 32, 3584, False, (0,), (1,))

    def one(case: str, config: str) -> Configuration:
        cell = Cell.of(1, config, case=case, in_flight=8)
        return configuration(cell, settings, "ipc:///wrong")

    assert one(GUESSES, "adaptive").server_key == one(SPEC_BENCH, "width-4").server_key
    assert one(GUESSES, "none").server_key == one(SIDECAR, "none").server_key
    misled = one(SIDECAR, "adaptive")
    assert "ipc:///wrong" in misled.flags
    assert misled.has_sidecar
    keys = {one(case, "adaptive").cores for case in (GUESSES, SIDECAR, RANDOM)}
    assert keys == {one(RANDOM, "none").cores} == {(0,)}


def test_a_misleading_guess_has_the_whole_answer_with_a_wrong_token_after_each_part() -> None:
    answer = [7, 3, 9, 4, 7, 3]
    flat = misleading(answer, 10)
    copies = flat.count(None) + 1
    assert copies > 1
    guess = flat[: flat.index(None)]
    assert guess == [7, 3, 0, 3, 9, 5, 9, 4, 8, 4, 7, 4]
    assert flat == ([*guess, None] * copies)[:-1]
    # A guess stays within the server's limits.
    flat = misleading(list(range(3000)), 5000)
    assert len([token for token in flat if token is not None]) <= GUESS_TOKENS


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
