"""Candidates of step drafts: how long they are kept, and at which nodes they count."""

from __future__ import annotations

import pytest

from sglang_qspec.engine.requests.step_proposals import MAX_TOKENS, StepProposals
from sglang_qspec.messages import Candidates, Drafted
from sglang_qspec.trie import DraftTree, DraftTrees, Source

FIRST, SECOND = 64, 65


def chunk(
    token_ids: list[int],
    *,
    number: int = FIRST,
    submission: int = 1,
    base_len: int = 2,
    start: int = 0,
) -> Drafted:
    """A chunk of drawn tokens; the candidates of each are the token itself and the next id."""
    candidates = [Candidates([token, token + 1], [0.25, 0.75]) for token in token_ids]
    return Drafted(submission, number, base_len, start, token_ids, candidates=candidates)


def ahead(drawn: StepProposals, output_ids: list[int], rid: str = "a") -> list[int]:
    return [token.token_id for token in drawn.ahead(rid, output_ids)]


def test_a_draft_token_counts_until_its_position_is_decided() -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5, 6]))
    drawn.take("a", chunk([7], start=2))
    assert ahead(drawn, [1, 2]) == [5, 6, 7]
    assert ahead(drawn, [1, 2, 5]) == [6, 7]
    assert ahead(drawn, [1, 2, 5, 6, 7]) == []
    drawn.take("a", chunk([8], start=3))  # the draft continues
    assert ahead(drawn, [1, 2, 5, 6, 7]) == [8]


def test_a_draft_that_the_target_diverged_from_never_counts_again() -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5, 6, 7]))
    assert ahead(drawn, [1, 2, 9]) == []
    drawn.take("a", chunk([8], start=3))
    assert ahead(drawn, [1, 2, 9]) == []
    assert len(drawn) == 0


def test_a_token_that_comes_after_its_position_is_decided_is_dropped() -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5]))
    assert ahead(drawn, [1, 2, 5, 6]) == []
    drawn.take("a", chunk([6, 7], start=1))
    assert ahead(drawn, [1, 2, 5, 6]) == [7]
    assert ahead(drawn, [1, 2, 5, 6, 7, 8]) == []
    drawn.take("a", chunk([9, 10], start=3))  # 9 where the target drew 8
    assert ahead(drawn, [1, 2, 5, 6, 7, 8]) == []


def test_a_new_draft_counts_when_the_target_diverged_from_the_earlier_one_or_used_it_up() -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5, 6]))
    drawn.take("a", chunk([50, 60, 70], number=SECOND, base_len=3))
    assert ahead(drawn, [1, 2]) == [5, 6]
    assert ahead(drawn, [1, 2, 9]) == [50, 60, 70]  # the target diverged from the first
    drawn.take("a", chunk([8], number=SECOND, submission=2, base_len=4))
    assert ahead(drawn, [1, 2, 9, 50]) == [60, 70]
    assert ahead(drawn, [1, 2, 9, 50, 60, 70]) == []
    drawn.take("a", chunk([5, 6], number=SECOND + 1, submission=2, base_len=6))
    assert ahead(drawn, [1, 2, 9, 50, 60, 70]) == [5, 6]  # the second is used up


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_chunk_that_does_not_continue_the_draft_is_ignored(start: int) -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5, 6]))
    drawn.take("a", chunk([9, 9], start=start))
    assert ahead(drawn, [1, 2]) == [5, 6]


def test_tokens_without_candidates_are_a_gap() -> None:
    drawn = StepProposals()
    drawn.take("a", Drafted(1, FIRST, 2, 0, [5]))
    drawn.take("a", chunk([6], start=1))
    assert ahead(drawn, [1, 2]) == []
    assert len(drawn) == 0


def test_a_draft_that_begins_beyond_the_output_does_not_count() -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5, 6], base_len=3))
    assert ahead(drawn, [1, 2]) == []


def test_at_most_max_tokens_are_kept_and_none_of_an_ended_request() -> None:
    drawn = StepProposals()
    for number in range(3):
        drawn.take("a", chunk([5] * 60, number=FIRST + number))
    assert ahead(drawn, [1, 2]) == [5] * 60
    assert ahead(drawn, [1, 2, *[5] * 60]) == []
    assert MAX_TOKENS < 180
    drawn.take("b", chunk([5]))
    drawn.end("a")
    drawn.end("b")
    assert len(drawn) == 0


def tree(token_ids: tuple[int, ...], parents: tuple[int, ...]) -> DraftTree:
    """A tree; the sources of its nodes do not matter here."""
    sources = (Source.PROMPT,) * len(token_ids)
    return DraftTree(token_ids, parents, sources, tuple(1 / (1 + i) for i in range(len(parents))))


def test_every_node_on_a_drafts_path_has_the_next_drafted_token() -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5, 6, 7]))
    drawn.take("c", chunk([5]))
    trees = DraftTrees.of(
        [
            tree((2, 9, 5, 6, 6), (0, 0, 0, 1, 2)),  # the 6 after 9 is not the draft's
            tree((2, 5, 6), (0, 0, 1)),
            tree((2, 8), (0, 0)),
        ],
        5,
    )
    proposals = drawn.proposals(["a", "b", "c"], [[1, 2]] * 3, trees)
    assert proposals is not None
    known = proposals.known.nonzero().flatten().tolist()
    assert known == [0, 2, 4, 10]
    assert proposals.token_ids[known].tolist() == [5, 6, 7, 5]
    assert proposals.candidate_ids[4].tolist() == [7, 8]
    assert proposals.candidate_probs[4].tolist() == [0.25, 0.75]
    roots = drawn.proposals(["b", "a"], [[1, 2]] * 2)
    assert roots is not None
    assert roots.known.tolist() == [False, True]
    assert int(roots.token_ids[1]) == 5


def test_padding_is_no_node_of_a_draft() -> None:
    drawn = StepProposals()
    drawn.take("a", chunk([5, 5, 5]))
    proposals = drawn.proposals(["a"], [[1, 2]], DraftTrees.of([tree((2, 5), (0, 0))], 4))
    assert proposals is not None
    assert proposals.known.tolist() == [True, True, False, False]


def test_without_drawn_tokens_there_are_no_proposals() -> None:
    drawn = StepProposals()
    assert drawn.proposals(["a"], [[1, 2]]) is None
    drawn.take("a", chunk([5]))
    assert drawn.proposals(["a"], [[1, 2, 4]]) is None


def test_candidates_are_normalized_and_padded_to_a_common_number() -> None:
    drawn = StepProposals()
    drawn.take("a", Drafted(1, FIRST, 0, 0, [5], candidates=[Candidates([5, 4], [0.25, 0.7495])]))
    drawn.take("b", Drafted(2, FIRST, 0, 0, [3], candidates=[Candidates([3], [1.0])]))
    proposals = drawn.proposals(["a", "b"], [[], []])
    assert proposals is not None
    assert proposals.candidate_probs.sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-15)
    assert proposals.candidate_ids.tolist() == [[5, 4], [3, 0]]
    assert proposals.candidate_probs[1].tolist() == [1.0, 0.0]
