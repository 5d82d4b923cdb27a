"""Totals of speculation over all requests."""

import pytest

from sglang_qspec.policy import AnswerKind
from sglang_qspec.policy.totals import FIRST_AGREEMENT, Totals
from sglang_qspec.trie import DraftTree, DraftTrees, Source

STEP, QUEUE = Source.STEP, Source.QUEUE


def chain(*sources: Source) -> DraftTree:
    size = len(sources) + 1
    return DraftTree(
        tuple(range(size)), (0, *range(size - 1)), (QUEUE, *sources), (1.0,) + (0.9,) * (size - 1)
    )


def test_tokens_are_counted_by_source() -> None:
    totals = Totals()
    totals.record(DraftTrees.of([chain(QUEUE, STEP), chain(STEP)], 4), [[1, 2], []])
    assert (totals.proposed[QUEUE], totals.proposed[STEP]) == (1, 2)
    assert (totals.accepted[QUEUE], totals.accepted[STEP]) == (1, 1)
    totals.take_back([STEP])
    assert totals.accepted[STEP] == 0


def test_agreement_is_the_share_of_right_tokens_up_to_the_first_wrong_one() -> None:
    totals = Totals()
    for _ in range(300):  # three right and one wrong; later ones do not count
        totals.record(DraftTrees.of([chain(*[STEP] * 7)], 8), [[1, 2, 3]])
    assert totals.agreement == pytest.approx(0.75, abs=0.01)


def test_drafts_of_other_sources_say_nothing_of_step_drafts() -> None:
    totals = Totals()
    totals.record(DraftTrees.of([chain(QUEUE, QUEUE)], 4), [[]])
    totals.record(DraftTrees.of([chain()], 1), [[]])
    assert totals.agreement == FIRST_AGREEMENT[totals.kind]


def test_each_kind_of_answers_begins_with_an_agreement_of_its_own() -> None:
    totals, found = Totals(), []
    for kind in (AnswerKind.GREEDY, AnswerKind.SAMPLED, AnswerKind.GRAMMAR):
        totals.kind = kind
        found.append(totals.agreement)
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3


def test_passes_are_summed_by_pipeline() -> None:
    totals = Totals()
    totals.note_pass("halves", requests=2, input_tokens=8, seconds=0.5, waited=0.1)
    totals.note_pass("halves", requests=3, input_tokens=12, seconds=0.25, waited=0.0)
    assert totals.describe()["pipelines"]["halves"] == {
        "passes": 2,
        "requests": 5,
        "input_tokens": 20,
        "seconds": 0.75,
        "waited_seconds": 0.1,
    }
