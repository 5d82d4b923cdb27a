"""How much of a request's scores is believed."""

import numpy as np
import pytest

from sglang_qspec.policy import Credit, FirstTokens
from sglang_qspec.policy.credit import MEMORY, MOST
from sglang_qspec.trie import DraftTree, DraftTrees, Source


def test_scores_are_believed_before_anything_was_seen() -> None:
    assert Credit().factor == 1.0


def test_drafts_that_are_as_good_as_their_scores_stay_believed() -> None:
    credit = Credit()
    for turn in range(400):
        credit.observe(0.5, turn % 2 == 0)
    assert credit.factor == pytest.approx(1.0, abs=0.05)


def test_drafts_that_are_always_wrong_are_soon_believed_little() -> None:
    credit = Credit()
    for _ in range(20):
        credit.observe(0.8, False)
    assert credit.factor < 0.25


def test_what_was_lost_can_be_won_back() -> None:
    credit = Credit()
    for _ in range(1000):
        credit.observe(0.9, False)
    for _ in range(4 * int(MEMORY)):
        credit.observe(0.9, True)
    assert credit.factor > 0.9


def test_a_request_is_not_believed_much_more_than_its_scores() -> None:
    credit = Credit()
    for _ in range(100):
        credit.observe(0.1, True)
    assert credit.factor == MOST


def test_first_tokens_are_those_behind_the_root_and_one_of_them_may_be_right() -> None:
    sources = (Source.STEP,) * 4
    forked = DraftTree((5, 6, 7, 8), (0, 0, 0, 1), sources, (1.0, 0.5, 0.3, 0.2))
    alone = DraftTree((5,), (0,), (Source.STEP,), (1.0,))
    first = FirstTokens.of(DraftTrees.of([forked, forked, alone], 4), np.array([7, 8, 5], np.int32))
    assert first.proposed.tolist() == [[False, True, True, False]] * 2 + [[False] * 4]
    assert first.right.tolist() == [[False, False, True, False], [False] * 4, [False] * 4]
