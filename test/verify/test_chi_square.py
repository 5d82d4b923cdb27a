"""The statistics of `chi_square` have the distribution that other tests assume."""

from collections import Counter

import torch

from test.verify.chi_square import compare, fit

EXPECTED = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)


def draws(count: int, seed: int, probs: torch.Tensor = EXPECTED) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probs, count, replacement=True, generator=generator)


def counts(count: int, seed: int, probs: torch.Tensor = EXPECTED) -> torch.Tensor:
    return torch.bincount(draws(count, seed, probs), minlength=5)


def test_p_is_uniform_for_a_correct_sample() -> None:
    found = [fit(counts(500, seed), EXPECTED).p for seed in range(400)]
    assert 0.02 < sum(p < 0.05 for p in found) / 400 < 0.09
    assert 0.4 < sum(p < 0.5 for p in found) / 400 < 0.6


def test_p_is_uniform_for_two_samples_of_one_distribution() -> None:
    found = [
        compare(Counter(draws(300, seed).tolist()), Counter(draws(900, seed + 1000).tolist())).p
        for seed in range(400)
    ]
    assert 0.02 < sum(p < 0.05 for p in found) / 400 < 0.09
    assert 0.4 < sum(p < 0.5 for p in found) / 400 < 0.6


def test_a_biased_sample_is_detected() -> None:
    biased = torch.tensor([0.46, 0.34, 0.15, 0.05, 0.0], dtype=torch.float64)
    assert fit(counts(20_000, 1, biased), EXPECTED).p < 1e-9
    ours, theirs = draws(20_000, 1, biased).tolist(), draws(20_000, 2).tolist()
    assert compare(Counter(ours), Counter(theirs)).p < 1e-9


def test_impossible_outcomes_give_p_zero() -> None:
    assert fit(torch.tensor([50, 30, 15, 4, 1]), EXPECTED).p == 0.0


def test_rare_outcomes_are_pooled() -> None:
    rare = torch.full((1001,), 0.0005, dtype=torch.float64)
    rare[0] = 0.5
    seen = torch.bincount(draws(200, 3, rare), minlength=1001)
    assert fit(seen, rare).freedom == 1
    assert fit(seen, rare).p > 0.01
