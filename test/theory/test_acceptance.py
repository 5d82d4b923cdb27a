"""Expected tokens of a pass."""

from __future__ import annotations

import random

import pytest

from sglang_qspec.theory import agreement, expected_tokens, queue_tokens
from sglang_qspec.theory.acceptance import hit_share
from test.theory import simulation


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.97, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4, 15])
def test_the_expected_tokens_are_those_that_are_counted(alpha: float, k: int) -> None:
    rng = random.Random(0)
    counted = sum(simulation.accepted(rng, alpha, k) + 1 for _ in range(20_000)) / 20_000
    assert expected_tokens(alpha, k) == pytest.approx(counted, rel=0.03)


def test_the_expected_tokens_are_equation_1_of_leviathan_et_al() -> None:
    assert expected_tokens(0.97, 4) == pytest.approx((1 - 0.97**5) / (1 - 0.97))
    assert expected_tokens(0.97, 4) == pytest.approx(4.71, abs=0.005)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.97, 1.0])
def test_the_agreement_is_found_again_from_the_tokens(alpha: float) -> None:
    assert agreement(expected_tokens(alpha, 4), 4) == pytest.approx(alpha, abs=1e-9)


def test_tokens_that_no_agreement_yields_give_the_nearest_one() -> None:
    assert agreement(0.9, 4) == 0.0
    assert agreement(5.2, 4) == 1.0
    assert agreement(1.7, 0) == 0.0


@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("again", [0.1, 0.5, 1.0])
def test_queue_tokens_are_those_of_a_text_that_leaves_its_drafts_and_finds_others(
    alpha: float, again: float
) -> None:
    counted = simulation.queue(alpha, 4, again, 40_000)
    assert queue_tokens(alpha, 4, again) == pytest.approx(counted, rel=0.03)


def test_drafts_that_are_never_found_again_are_of_use_only_if_they_are_never_left() -> None:
    assert hit_share(0.9, 4, 0.0) == 0.0
    assert hit_share(1.0, 4, 0.0) == 1.0
    assert queue_tokens(0.9, 4, 1.0) == expected_tokens(0.9, 4)
