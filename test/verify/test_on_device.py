"""Draws on a device equal those of the CPU, which other tests compare with computed ones.

`scripts/gpu-check` runs these tests on a GPU (`--device cuda`). On a CPU they take the way of other
devices where both differ.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_qspec.messages import SeededSampling
from sglang_qspec.sidecar import sampler
from sglang_qspec.sidecar.sampling import GREEDY, Sampling
from sglang_qspec.verify import rows as picking
from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from sglang_qspec.verify.sample import Draws, sample_probs

SAME = 0.98
"""Smallest share of equal draws where the device rounds sums in another order than the CPU."""


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def without_picking(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU treat rows as other devices do."""
    if device.type == "cpu":
        monkeypatch.setattr(picking, "picks", lambda _mask: False)


def are_mostly_equal(found: Tensor, expected: Tensor) -> None:
    share = (found == expected).float().mean().item()
    assert share >= SAME, f"only {share:.1%} of {len(found)} tokens equal the CPU's"


@pytest.mark.gpu
def test_seeded_draws_are_those_of_the_cpu(device: torch.device) -> None:
    """The kernel of Triton on a GPU; test_gumbel_triton.py interprets it on a CPU."""
    if device.type == "cpu":
        pytest.skip("compares a GPU with the CPU (--device cuda)")
    for count, columns in ((64, 128_256), (7, 49_152), (3, 300), (0, 300)):
        # Rows from flat to nearly certain, some of them with zeros.
        logits = torch.randn(count, columns, generator=generator())
        scale = torch.tensor([0.0, 0.5, 3.0, 30.0]).repeat(-(-count // 4))[:count]
        weights = torch.softmax(logits * scale.unsqueeze(1), -1)
        weights[::5, 40:] = 0.0
        seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator())
        given = (weights, seeds, torch.arange(count) * 7)
        drawn = gumbel_argmax(*(values.to(device) for values in given)).cpu()
        wrong = (drawn != gumbel_argmax(*given)).nonzero().flatten().tolist()
        assert not wrong, f"{len(wrong)} of {count} rows of {columns} differ: {wrong[:5]}"


def test_filtered_draws_equal_those_of_the_cpu_but_for_rounding(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, vocab = 240, 3000
    probs = torch.softmax(torch.randn(count, vocab, generator=generator()) * 3, -1)
    draws = Draws(
        torch.tensor([vocab, 7, 1]).repeat(count // 3),
        torch.tensor([1.0, 0.9, 1.0, 1.0]).repeat(count // 4),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05]).repeat(count // 5),
        torch.arange(count),
        torch.arange(count) * 3,
    )
    expected = sample_probs(probs, draws)
    without_picking(device, monkeypatch)
    filters = draws._asdict().items()
    moved = draws._replace(**{name: one.to(device) for name, one in filters if one is not None})
    are_mostly_equal(sample_probs(probs.to(device), moved).cpu(), expected)


def test_draft_tokens_equal_those_of_the_cpu_but_for_rounding(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(48, 5001, generator=generator()) * 3
    seeded = SeededSampling(1, 0.8, 50, 0.9, 0.0)
    kinds: list[Sampling | SeededSampling] = [GREEDY, Sampling(0.7), Sampling(1.2, 0.8), seeded]
    asked, numbers = [kinds[row % 4] for row in range(48)], list(range(48))
    expected = sampler.choose(logits, asked, numbers, numbers).token_ids
    without_picking(device, monkeypatch)
    found = sampler.choose(logits.to(device), asked, numbers, numbers).token_ids
    assert found[::4] == expected[::4]  # greedy
    are_mostly_equal(torch.tensor(found), torch.tensor(expected))
