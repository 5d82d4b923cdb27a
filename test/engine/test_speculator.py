"""The speculator over the library's fake link: its messages, and the trees that it proposes."""

import pytest

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.draft_source import OF_SIDECAR, OF_STEPS
from sglang_qspec.engine.requests.jacobi import STRIDE
from sglang_qspec.engine.requests.live_request import Tally
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Drafted, SeededSampling
from sglang_qspec.trie import Source
from test.engine.speculating import (
    PROMPT,
    VOCAB,
    commits,
    connect,
    counting,
    enqueue,
    finish_pass,
    make,
    poll,
    replace_sidecar,
    tree_of,
)


def test_a_waiting_request_gets_the_sidecars_completion_as_its_tree(active: Speculator) -> None:
    enqueue(active)
    poll(active)
    tree = tree_of(active, "a", [8], 4)
    assert tree.token_ids == (8, 9, 10, 11)
    assert tree.sources[1:] == (Source.QUEUE,) * 3
    active.check_integrity()


def test_a_submission_names_prompt_length_and_stop_tokens(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    (submit,) = link.submits
    assert (submit.token_ids, submit.base_len, submit.max_new_tokens) == (PROMPT, 0, 30)
    assert submit.stop_token_ids == [2]
    assert submit.completions == 8
    assert (submit.temperature, submit.top_p, submit.greedy_first) == (0.6, 1.0, True)


def test_a_submission_has_the_rank_and_the_options_of_its_request(
    link: FakeSidecarLink,
) -> None:
    active = connect(link, top_p=0.9)
    wanted = {
        "qspec_completions": 2,
        "qspec_temperature": 0.1,
        "qspec_top_p": 0.5,
        "qspec_greedy_first": False,
        "qspec_max_completion_tokens": 7,
    }
    enqueue(active, custom_params=wanted, rank=(-3, 0))
    (submit,) = link.submits
    assert (submit.rank, submit.completions, submit.max_new_tokens) == ((-3, 0), 2, 7)
    assert (submit.temperature, submit.top_p, submit.greedy_first) == (0.1, 0.5, False)


def test_each_submission_has_the_sampling_seed_and_filters_of_its_request(
    active: Speculator, link: FakeSidecarLink
) -> None:
    seeded = SeededSampling(seed=5, temperature=0.7, top_p=0.9)
    enqueue(active, seeded=seeded)
    enqueue(active, "greedy")
    enqueue(active, output_ids=[8, 9], seeded=seeded)  # retracted
    assert [submit.seeded for submit in link.submits] == [seeded, None, seeded]


def test_a_request_with_speculation_off_is_decoded_plainly(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active, custom_params={"qspec_enabled": False})
    active.admit("a")
    poll(active)
    assert tree_of(active, "a", [8, 9, 8], 4).token_ids == (8,)
    assert active.end("a") is None
    assert not [*link.submits, *link.closes, *link.admits]


def test_output_of_passes_without_drafts_is_reported_and_drafted_from(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    plain = active.propose(["a"], [[8]], 1, drafts=False)
    finish_pass(active, ["a"], plain, [[]], [9])
    assert tree_of(active, "a", [8, 9], 3).token_ids == (9, 10, 11)
    assert [commit.token_ids for commit in commits(link)] == [[8], [9]]


@pytest.mark.parametrize("source", list(Source))
def test_a_request_uses_the_sources_that_it_names_and_no_others(
    link: FakeSidecarLink, source: Source
) -> None:
    active = connect(link, of_head=source is Source.HEAD, jacobi_tokens=2)
    named = [Source.STEP, source] if source is Source.SECOND else [source]
    names = [each.name.lower() for each in named]
    custom_params = {"qspec_sources": names, "qspec_guess_ids": [300, 8, 20, 21]}
    prompt_ids = [6, 300, 8, 400, 7]
    enqueue(active, prompt_ids=prompt_ids, custom_params=custom_params)
    poll(active)
    output_ids = [8] if source is Source.QUEUE else [300, 8, 500, 300, 8]
    tree = tree_of(active, "a", output_ids, 6)
    of_sidecar = source in OF_SIDECAR
    if OF_STEPS & set(named):
        submission = link.submits[0].submission
        link.inject(Drafted(submission, MAX_COMPLETIONS, 5, 0, [600], second_ids=[601]))
        poll(active)
        tree = tree_of(active, "a", output_ids, 6)
    guessed = prompt_ids[len(output_ids) * STRIDE % len(prompt_ids)]
    expected = dict(zip(Source, (9, 20, 400, 500, 600, 600, guessed, 601), strict=True))
    assert set(tree.sources[1:]) == set(named)
    assert expected[source] in tree.token_ids
    assert len(link.submits) == of_sidecar
    replace_sidecar(active, link)
    active.admit("a")
    active.end("a")
    assert bool(link.closes) == bool(link.admits) == of_sidecar


def test_wrong_controls_that_the_front_did_not_refuse_are_ignored(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active, custom_params={"qspec_completions": 1000})
    assert link.submits[0].completions == 8


def test_a_request_that_comes_before_the_sidecar_is_submitted_when_it_connects(
    link: FakeSidecarLink,
) -> None:
    active = make(link)
    enqueue(active)
    assert link.submits == []
    poll(active)
    assert [submit.token_ids for submit in link.submits] == [PROMPT]


def test_a_full_queue_delays_a_submission_and_loses_nothing(
    active: Speculator, link: FakeSidecarLink
) -> None:
    link.queue_full = True
    enqueue(active)
    poll(active)
    assert link.submits == []
    link.queue_full = False
    poll(active)
    assert [submit.token_ids for submit in link.submits] == [PROMPT]


def test_a_new_sidecar_gets_live_requests_with_their_committed_output(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    tree_of(active, "a", [8, 9], 4)
    replace_sidecar(active, link)
    assert link.submits[-1].base_len == 2
    assert link.submits[-1].token_ids == [*PROMPT, 8, 9]
    assert len(tree_of(active, "a", [8, 9, 10], 4)) == 4


def test_a_retracted_request_keeps_its_trie_and_is_submitted_again(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    tree_of(active, "a", [8, 9], 4)
    enqueue(active, output_ids=[8, 9])
    assert [close.submission for close in link.closes] == [link.submits[0].submission]
    assert link.submits[1].submission != link.submits[0].submission
    assert link.submits[1].base_len == 2
    assert len(tree_of(active, "a", [8, 9], 4)) == 4


@pytest.mark.parametrize("output_ids", [[8, 9], []], ids=["retracted", "from the start"])
def test_a_request_that_comes_again_keeps_its_guesses(
    link: FakeSidecarLink, output_ids: list[int]
) -> None:
    active = connect(link)
    guesses = {"qspec_guess_ids": [8, 9, 4, 5, 6]}
    enqueue(active, custom_params=guesses)
    tree_of(active, "a", [8, 9], 4)
    enqueue(active, output_ids=output_ids, custom_params=guesses)
    assert tree_of(active, "a", [8, 9], 4).token_ids == (9, 4, 5, 6)


def test_an_admitted_request_is_deferred_once_and_again_after_a_retraction(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    active.admit("a")
    active.admit("a")
    active.admit("unknown")
    assert [admit.submission for admit in link.admits] == [link.submits[0].submission]
    enqueue(active, output_ids=[8, 9])
    active.admit("a")
    assert [admit.submission for admit in link.admits] == [
        submit.submission for submit in link.submits
    ]


def test_a_request_admitted_before_its_submission_is_deferred_after_it(
    link: FakeSidecarLink,
) -> None:
    active = make(link)
    enqueue(active)
    active.admit("a")
    assert link.admits == []
    poll(active)
    assert [admit.submission for admit in link.admits] == [link.submits[0].submission]


@pytest.mark.parametrize(("setting", "closes"), [("stop", 1), ("continue", 0)])
def test_admission_may_stop_the_drafts_of_a_request_or_continue_them(
    link: FakeSidecarLink, setting: str, closes: int
) -> None:
    active = connect(link, on_admission=setting)
    enqueue(active)
    poll(active)
    active.admit("a")
    assert len(link.closes) == closes
    assert link.admits == []
    assert len(tree_of(active, "a", [8], 4)) == 4  # earlier drafts are kept
    replace_sidecar(active, link)
    assert len(link.submits) == 2 - closes


def test_nothing_of_a_finished_request_reaches_a_new_one_of_the_same_rid() -> None:
    link = FakeSidecarLink(counting, vocab_size=VOCAB, delay=3)
    active = make(link)
    poll(active)
    enqueue(active)
    active.end("a")
    enqueue(active, prompt_ids=[100])
    poll(active, 10)
    tree = tree_of(active, "a", [101], 4)
    assert set(tree.token_ids) <= set(range(100, 200))
    assert tree_of(active, "a", [101, 8], 4).token_ids == (8,)


def test_the_end_of_a_request_frees_its_trie_and_stops_the_sidecar(
    active: Speculator, link: FakeSidecarLink
) -> None:
    enqueue(active)
    poll(active)
    assert active.end("a") is not None
    assert active.end("a") is None
    assert [close.submission for close in link.closes] == [link.submits[0].submission]
    assert active.describe()["trie_tokens"] == active.describe()["live_requests"] == 0
    active.check_integrity()


def test_guesses_and_the_prompt_give_drafts_without_a_sidecar() -> None:
    active = make(None)
    enqueue(active, custom_params={"qspec_guess_ids": [20, 21, 22, None, 30, 31]})
    tree = tree_of(active, "a", [20], 3)
    assert tree.token_ids == (20, 21, 22)
    assert tree.sources[1:] == (Source.GUESS,) * 2
    tree = tree_of(active, "a", [20, 5, 6], 3)
    assert tree.token_ids[:2] == (6, 7)
    assert tree.sources[1] is Source.PROMPT


def test_wrong_guesses_that_the_front_did_not_refuse_are_ignored() -> None:
    active = make(None)
    enqueue(active, custom_params={"qspec_guess_ids": [VOCAB + 1]})
    assert tree_of(active, "a", [20], 3).token_ids == (20,)


def test_a_request_for_one_token_gets_no_drafts(active: Speculator, link: FakeSidecarLink) -> None:
    enqueue(active, max_new_tokens=1)
    assert link.submits == []
    assert tree_of(active, "a", [8], 4).token_ids == (8,)


def test_the_last_token_gets_no_draft(active: Speculator) -> None:
    enqueue(active, max_new_tokens=3)
    poll(active)
    assert len(tree_of(active, "a", [8], 4)) > 1
    assert tree_of(active, "a", [8, 9], 4).token_ids == (9,)


def test_a_tally_counts_passes_proposals_and_sources(active: Speculator) -> None:
    enqueue(active)
    poll(active)
    finish_pass(active, ["a"], active.propose(["a"], [[8]], 4), [[1, 2]], [11])
    finish_pass(active, ["a"], active.propose(["a"], [[8, 9, 10, 11]], 1), [[]], [12])
    tally = active.end("a")
    assert tally is not None
    record = tally.record()
    assert (record["passes"], record["proposed_tokens"], record["accepted_tokens"]) == (2, 3, 2)
    assert record["accept_length"] == 2.0
    by_source = record["accepted_by_source"]
    assert by_source == {
        "queue": 2,
        **dict.fromkeys(("guess", "prompt", "output", "step", "head", "jacobi", "second"), 0),
    }


def test_dropped_drafts_are_gone_and_requests_stay(active: Speculator) -> None:
    enqueue(active)
    poll(active)
    tree_of(active, "a", [8], 4)
    active.drop_drafts()
    assert tree_of(active, "a", [8], 4).token_ids == (8,)
    active.check_integrity()


def test_tokens_accepted_past_the_end_do_not_count() -> None:
    tally = Tally(passes=3, proposed=9, latest=[Source.GUESS, Source.QUEUE, Source.QUEUE])
    tally.accepted.update({Source.QUEUE: 5, Source.GUESS: 1})
    assert tally.clip(0) == []
    assert tally.record()["accept_length"] == 3.0
    assert tally.clip(1) == []  # the target's own token, which comes last
    assert tally.record()["accept_length"] == 8 / 3
    assert tally.clip(3) == [Source.QUEUE, Source.QUEUE]
    assert (tally.accepted[Source.QUEUE], tally.accepted[Source.GUESS]) == (3, 1)
    assert tally.record()["accept_length"] == 2.0
