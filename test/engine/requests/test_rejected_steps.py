"""Which step drafts the target decides by rejection sampling, over the library's fake link."""

from __future__ import annotations

import msgspec
import pytest

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.messages import Candidates, Drafted, SeededSampling
from test.engine.speculating import VOCAB, connect, enqueue, finish_pass, poll, replace_sidecar

REJECTING = SeededSampling(0, 1.0, probabilities=True)


@pytest.fixture
def link() -> FakeSidecarLink:
    return FakeSidecarLink(vocab_size=VOCAB)


def serve(link: FakeSidecarLink, seeded: SeededSampling | None = REJECTING) -> Speculator:
    """A speculator with a request "a" that has committed 8 and 9."""
    active = connect(link)
    enqueue(active, seeded=seeded)
    poll(active)
    active.admit("a")
    active.propose(["a"], [[8, 9]], 4)
    return active


def drafted(link: FakeSidecarLink, *, number: int = MAX_COMPLETIONS, start: int = 0) -> Drafted:
    """Two draft tokens for the positions 2 + `start` and 3 + `start` of the output."""
    tokens = [20 + start, 21 + start]
    candidates = [Candidates([token, 500], [0.5, 0.5]) for token in tokens]
    submission = link.submits[-1].submission
    return Drafted(submission, number, 2, start, tokens, candidates=candidates)


def undecided(active: Speculator, output_ids: list[int]) -> list[int]:
    """Drawn tokens of request "a" that continue `output_ids`."""
    return [token.token_id for token in active.step_proposals.ahead("a", output_ids)]


def test_a_step_draft_counts_at_its_undecided_positions(link: FakeSidecarLink) -> None:
    active = serve(link)
    link.inject(drafted(link))
    link.inject(drafted(link, start=2))
    poll(active)
    trees = active.propose(["a"], [[8, 9]], 4)
    proposals = active.step_proposals.proposals(["a"], [[8, 9]], trees)
    assert proposals is not None
    assert trees.token_ids[0].tolist() == [9, 20, 21, 22]
    assert proposals.known.all()
    assert proposals.token_ids.tolist() == [20, 21, 22, 23]
    finish_pass(active, ["a"], trees, [[]], [20])
    assert undecided(active, [8, 9, 20]) == [21, 22, 23]
    active.end("a")
    assert len(active.step_proposals) == 0


@pytest.mark.parametrize("seeded", [None, SeededSampling(5, 1.0)])
def test_greedy_requests_and_requests_with_matched_drafts_keep_no_candidates(
    link: FakeSidecarLink, seeded: SeededSampling | None
) -> None:
    active = serve(link, seeded)
    link.inject(drafted(link))
    poll(active)
    assert 20 in active.propose(["a"], [[8, 9]], 4)[0].token_ids
    assert undecided(active, [8, 9]) == []


def test_queue_drafts_and_chunks_that_the_trie_refused_do_not_count(link: FakeSidecarLink) -> None:
    active = serve(link)
    link.inject(drafted(link, number=0))
    link.inject(msgspec.structs.replace(drafted(link), base_len=3))  # ahead of the output
    poll(active)
    assert len(active.step_proposals) == 0


def test_drafts_of_a_lost_sidecar_count_before_those_of_the_next(
    link: FakeSidecarLink,
) -> None:
    active = serve(link)
    link.inject(drafted(link))
    poll(active)
    replace_sidecar(active, link)
    other = drafted(link)
    candidates = [Candidates([600], [1.0])] * 2
    link.inject(msgspec.structs.replace(other, token_ids=[600, 600], candidates=candidates))
    poll(active)
    assert undecided(active, [8, 9]) == [20, 21]
    assert undecided(active, [8, 9, 600]) == [600]
