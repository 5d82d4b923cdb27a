"""Agreement and accepted runs along answers of the target."""

from __future__ import annotations

import random

import pytest

from sglang_qspec.policy.acceptance import expected_tokens, hit_share
from sglang_qspec.tools.measure.agreement import judged, matching_again, share, tokens_per_pass


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


def test_traces_say_which_tokens_the_draft_model_chose() -> None:
    def passed(parents: list[int], accepted: list[bool]) -> dict[str, object]:
        return {"tree": {"parents": parents, "accepted": accepted}}

    traces = [
        [
            passed([-1, 0, 1], [True, True, False]),  # two right, one wrong
            passed([], []),  # no draft
            passed([-1, 0], [True, True]),  # all right: the next token is unknown
            passed([-1, -1], [False, True]),  # siblings, one is right
            passed([-1], [False]),
        ],
        [passed([], [])],
    ]
    answers, share, depth = judged(traces)
    assert answers == ["110" + "11" + "1" + "0"]
    assert share == pytest.approx(4 / 5)
    assert depth == pytest.approx((3 + 2 + 1 + 1) / 4)


def test_matching_again_inverts_the_theory() -> None:
    answers = ["1110"] * 5
    share = hit_share(0.75, 4, 0.3)
    assert matching_again(answers, share, 4) == pytest.approx(0.3)
