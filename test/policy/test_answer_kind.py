"""A batch is of the kind that prevails in it."""

import pytest

from sglang_qspec.policy import AnswerKind

GREEDY, SAMPLED, GRAMMAR, GUESSED, MIXED = AnswerKind


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([SAMPLED], SAMPLED),
        ([GREEDY, GRAMMAR], MIXED),
        ([GRAMMAR, GREEDY, GRAMMAR, GRAMMAR], GRAMMAR),
        ([GRAMMAR, GREEDY, GRAMMAR, GRAMMAR, SAMPLED], MIXED),
    ],
)
def test_three_quarters_of_the_requests_decide(
    kinds: list[AnswerKind], expected: AnswerKind
) -> None:
    assert AnswerKind.of_batch(kinds) is expected
