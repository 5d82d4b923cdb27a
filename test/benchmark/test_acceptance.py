"""The acceptance rates of the rules, on made-up distributions."""

import pytest
import torch

from benchmark.bench_acceptance import WIDTH, agreement, chances_of, tokens_per_pass


def test_rules_accept_at_the_rate_of_their_formulas_and_equal_models_always_agree() -> None:
    logits = torch.randn(30, 3000, generator=torch.Generator().manual_seed(1)) * 3
    p = torch.softmax(logits, -1)
    q = torch.softmax(logits + torch.randn(30, 3000) * 0.5, -1)
    rules = dict(chances_of(p, q, 200))
    assert torch.equal(rules["greedy"], p[torch.arange(30), q.argmax(-1)])
    overlap = rules["reject"]
    assert overlap == pytest.approx(1 - (p - q).abs().sum(1) / 2, abs=1e-5)
    # The bounds of coupling without communication, over all rows.
    assert (overlap / (2 - overlap)).mean() - 0.02 < rules["match"].mean() <= overlap.mean() + 0.02
    assert rules["reject, 8 ids"].mean() < rules["reject, 64 ids"].mean() < overlap.mean()
    assert agreement(p, p, 3).eq(1).all()


def test_a_pass_yields_one_token_and_the_draft_tokens_before_the_first_miss() -> None:
    assert tokens_per_pass([[0.0] * WIDTH]) == 1.0
    assert tokens_per_pass([[1.0] * WIDTH, [1.0] * WIDTH]) == WIDTH
    half = sum(0.5**count for count in range(WIDTH))
    assert tokens_per_pass([[0.5] * WIDTH]) == pytest.approx(half)
