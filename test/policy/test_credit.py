"""The credit that scales the scores of a request's drafts."""

import numpy as np
import pytest

from sglang_qspec.policy import Credit, FirstTokens
from sglang_qspec.policy.credit import MEMORY, MOST
from sglang_qspec.trie import DraftTree, DraftTrees, Source


def test_credit_is_1_before_the_first_observation() -> None:
    assert Credit().factor == 1.0


def test_credit_stays_near_1_while_drafts_are_right_as_often_as_scored() -> None:
    credit = Credit()
    for turn in range(400):
        credit.observe(0.5, turn % 2 == 0)
    assert credit.factor == pytest.approx(1.0, abs=0.05)


def test_drafts_that_are_always_wrong_soon_lose_credit() -> None:
    credit = Credit()
    for _ in range(20):
        credit.observe(0.8, False)
    assert credit.factor < 0.25


def test_right_drafts_restore_lost_credit() -> None:
    credit = Credit()
    for _ in range(1000):
        credit.observe(0.9, False)
    for _ in range(4 * int(MEMORY)):
        credit.observe(0.9, True)
    assert credit.factor > 0.9


def test_credit_is_capped() -> None:
    credit = Credit()
    for _ in range(100):
        credit.observe(0.1, True)
    assert credit.factor == MOST


def test_first_tokens_are_the_children_of_the_root_and_at_most_one_is_right() -> None:
    sources = (Source.STEP,) * 4
    forked = DraftTree((5, 6, 7, 8), (0, 0, 0, 1), sources, (1.0, 0.5, 0.3, 0.2))
    alone = DraftTree((5,), (0,), (Source.STEP,), (1.0,))
    first = FirstTokens.of(DraftTrees.of([forked, forked, alone], 4), np.array([7, 8, 5], np.int32))
    assert first.proposed.tolist() == [[False, True, True, False]] * 2 + [[False] * 4]
    assert first.right.tolist() == [[False, False, True, False], [False] * 4, [False] * 4]
