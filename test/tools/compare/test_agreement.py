"""Agreement and accepted runs along answers of the target."""

from __future__ import annotations

import random

import pytest

from sglang_qspec.policy.acceptance import expected_tokens
from sglang_qspec.tools.compare.agreement import share, tokens_per_pass


def test_the_share_counts_positions_not_answers() -> None:
    assert share([[True, True, True], [False]]) == 0.75
    assert share([[], []]) == 0.0


@pytest.mark.parametrize(
    ("agreed", "k", "passes"),
    [
        ([True] * 6, 2, 2),  # two passes of two draft tokens and the target's own
        ([False] * 4, 4, 4),  # each pass has only the target's own token
        ([True, False, True, True, False], 4, 2),
        ([True, False, True, True, False], 1, 3),
        ([True, True, True], 8, 1),  # the answer ends in the run
    ],
)
def test_a_pass_accepts_up_to_the_first_token_that_differs(
    agreed: list[bool], k: int, passes: int
) -> None:
    assert tokens_per_pass([agreed], k) == len(agreed) / passes


def test_passes_of_all_answers_count_alike() -> None:
    assert tokens_per_pass([[True] * 3, [False]], 2) == 4 / 2
    assert tokens_per_pass([], 2) == 1.0


@pytest.mark.parametrize("k", [1, 4, 15])
def test_independent_agreement_gives_the_tokens_of_the_theory(k: int) -> None:
    rng = random.Random(0)
    answer = [rng.random() < 0.8 for _ in range(200_000)]
    assert tokens_per_pass([answer], k) == pytest.approx(expected_tokens(0.8, k), rel=0.01)
