"""Expected tokens per pass."""

from __future__ import annotations

import random

import pytest

from sglang_qspec.policy.acceptance import agreement, expected_tokens, hit_share, queue_tokens
from test.tools.theory import simulation


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.97, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4, 15])
def test_the_expected_tokens_match_a_simulation(alpha: float, k: int) -> None:
    rng = random.Random(0)
    counted = sum(simulation.accepted(rng, alpha, k) + 1 for _ in range(20_000)) / 20_000
    assert expected_tokens(alpha, k) == pytest.approx(counted, rel=0.03)


def test_the_expected_tokens_match_equation_1_of_leviathan_et_al() -> None:
    assert expected_tokens(0.97, 4) == pytest.approx((1 - 0.97**5) / (1 - 0.97))
    assert expected_tokens(0.97, 4) == pytest.approx(4.71, abs=0.005)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.97, 1.0])
def test_the_agreement_is_recovered_from_the_expected_tokens(alpha: float) -> None:
    assert agreement(expected_tokens(alpha, 4), 4) == pytest.approx(alpha, abs=1e-9)


def test_unreachable_expected_tokens_give_the_nearest_agreement() -> None:
    assert agreement(0.9, 4) == 0.0
    assert agreement(5.2, 4) == 1.0
    assert agreement(1.7, 0) == 0.0


@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("again", [0.1, 0.5, 1.0])
def test_queue_tokens_match_a_simulated_text_that_diverges_and_matches_again(
    alpha: float, again: float
) -> None:
    counted = simulation.queue(alpha, 4, again, 40_000)
    assert queue_tokens(alpha, 4, again) == pytest.approx(counted, rel=0.03)


def test_drafts_that_are_never_matched_again_help_only_without_divergence() -> None:
    assert hit_share(0.9, 4, 0.0) == 0.0
    assert hit_share(1.0, 4, 0.0) == 1.0
    assert queue_tokens(0.9, 4, 1.0) == expected_tokens(0.9, 4)
