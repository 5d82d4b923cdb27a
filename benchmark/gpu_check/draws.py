"""Draws, filters and penalties on a device, against the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_qspec.messages import SeededSampling
from sglang_qspec.sidecar import sampling
from sglang_qspec.sidecar.sampling import GREEDY, Sampling
from sglang_qspec.verify import gumbel_triton
from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from sglang_qspec.verify.inverse import draw_columns
from sglang_qspec.verify.likeliest import likeliest
from sglang_qspec.verify.penalties import BatchPenalties, penalize
from sglang_qspec.verify.rejection import Proposals, sample_near
from sglang_qspec.verify.sample import Draws, sample_probs
from sglang_qspec.verify.seeded import hash_state
from test.verify.chi_square import fit

SHAPES = ((64, 128_256), (7, 49_152), (3, 300), (0, 300))
"""Rows and columns of the weights on a GPU."""
SMALL_SHAPES = ((12, 300), (0, 300))
SMALL_SIZES = {"block": 64, "part": 2}
"""Block and part sizes for Triton's interpreter, which needs about a second per 1000 columns."""
SAME = 0.98
"""Smallest share of equal draws where the device rounds sums in another order than the CPU."""
LEVEL = 1e-6
"""Smallest p-value of a right build."""
SAMPLES = 20_000


def gumbel(device: torch.device) -> str:
    """The fused Triton kernel draws exactly what numpy draws on a CPU."""
    shapes = SHAPES if device.type == "cuda" else SMALL_SHAPES
    total = 0
    for count, columns in shapes:
        weights = _weights(count, columns)
        seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=_generator())
        positions = torch.arange(count) * 7
        expected = gumbel_argmax(weights, seeds, positions)
        on_device = [each.to(device) for each in (weights, seeds, positions)]
        if device.type == "cuda":
            drawn = gumbel_argmax(*on_device)
        else:
            states, guesses = hash_state(seeds, positions), likeliest(weights)
            drawn = gumbel_triton.search(weights, states, guesses, **SMALL_SIZES)
        wrong = (drawn.cpu() != expected).nonzero().flatten().tolist()
        assert not wrong, f"{len(wrong)} of {count} rows with {columns} columns differ: {wrong[:5]}"
        total += count
    return f"{total} draws equal"


def likeliest_tokens(device: torch.device) -> None:
    """The argmax is the lowest id among equals."""
    logits = torch.randn(40, 3001, generator=_generator()).round()  # with many equal maxima
    assert torch.equal(likeliest(logits.to(device)).cpu(), logits.argmax(-1))


def filters(device: torch.device) -> str:
    """Seeded draws behind every filter equal those of the CPU, but for ties by rounding."""
    count, vocab = 240, 3000
    probs = torch.softmax(torch.randn(count, vocab, generator=_generator()) * 3, -1)
    draws = Draws(
        torch.tensor([vocab, 7, 1]).repeat(count // 3),
        torch.tensor([1.0, 0.9, 1.0, 1.0]).repeat(count // 4),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05]).repeat(count // 5),
        torch.arange(count),
        torch.arange(count) * 3,
    )
    drawn = sample_probs(probs.to(device), _moved(draws, device)).cpu()
    return _mostly_equal(drawn, sample_probs(probs, draws))


def penalties(device: torch.device) -> None:
    """Logits after penalties, at every node of trees."""
    count, width, vocab = 5, 8, 3000
    generator = _generator()
    logits = torch.randn(count * width, vocab, generator=generator)
    token_ids = torch.randint(vocab, (count, width), generator=generator)
    mask = torch.rand(count, width, width, generator=generator) < 0.5
    mask = mask.tril() | torch.eye(width, dtype=torch.bool)
    given = BatchPenalties(
        rows=torch.tensor([0, 2, 4]),
        frequency=torch.tensor([0.5, 0.0, -0.3]),
        presence=torch.tensor([0.0, 0.7, 0.2]),
        repetition=torch.tensor([1.0, 1.3, 0.8]),
        min_new_tokens=torch.tensor([0, 40, 4]),
        stop_ids=torch.tensor([[2, 2], [2, 5], [7, 7]]),
        output_lens=torch.tensor([30, 30, 2]),
        output_ids=torch.arange(30).repeat(3, 1),
        output_counts=torch.arange(30).remainder(4).float().repeat(3, 1),
    )
    expected, found = logits.clone(), logits.to(device)
    rows = torch.arange(len(logits)).view(token_ids.shape)
    penalize(expected, given, token_ids, mask, rows)
    moved = BatchPenalties(*(values.to(device) for values in given))
    penalize(found, moved, token_ids.to(device), mask.to(device), rows.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def inverse(device: torch.device) -> str:
    """Draws with torch's global generator have the distribution of the weights."""
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25, 0.25])
    drawn = draw_columns(weights.to(device).expand(SAMPLES, -1))
    return _fits(drawn, weights / weights.sum())


def rejection(device: torch.device) -> str:
    """Rejection sampling near drafts gives the target's distribution."""
    target = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1])
    offered = torch.tensor([0.1, 0.4, 0.0, 0.4, 0.1])
    drafts = torch.multinomial(offered, SAMPLES, replacement=True, generator=_generator())
    proposals = Proposals(
        torch.arange(SAMPLES) % 3 > 0,
        drafts,
        torch.arange(5).expand(SAMPLES, -1),
        offered.expand(SAMPLES, -1),
    )
    moved = Proposals(*(values.to(device) for values in proposals))
    drawn = sample_near(target.to(device).expand(SAMPLES, -1), moved)
    return _fits(drawn, target)


def sidecar_sampling(device: torch.device) -> str:
    """Draft tokens of all kinds of requests equal the CPU's draft tokens, but for rounding ties."""
    logits = torch.randn(48, 5001, generator=_generator()) * 3
    seeded = SeededSampling(1, 0.8, 50, 0.9, 0.0)
    kinds: list[Sampling | SeededSampling] = [GREEDY, Sampling(0.7), Sampling(1.2, 0.8), seeded]
    asked = [kinds[row % 4] for row in range(48)]
    numbers = list(range(48))
    found = sampling.choose(logits.to(device), asked, numbers, numbers).token_ids
    expected = sampling.choose(logits, asked, numbers, numbers).token_ids
    assert found[::4] == expected[::4], "greedy draft tokens differ"
    return _mostly_equal(torch.tensor(found), torch.tensor(expected))


def _weights(count: int, columns: int) -> Tensor:
    """Rows from flat to nearly certain, some of them with zeros."""
    logits = torch.randn(count, columns, generator=_generator())
    scale = torch.tensor([0.0, 0.5, 3.0, 30.0]).repeat(-(-count // 4))[:count]
    weights = torch.softmax(logits * scale.unsqueeze(1), -1)
    weights[::5, 40:] = 0.0
    return weights


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _moved(draws: Draws, device: torch.device) -> Draws:
    def moved(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(device)

    return Draws(
        moved(draws.top_ks),
        moved(draws.top_ps),
        moved(draws.min_ps),
        moved(draws.seeds),
        moved(draws.positions),
    )


def _mostly_equal(found: Tensor, expected: Tensor) -> str:
    share = (found == expected).float().mean().item()
    assert share >= SAME, f"only {share:.1%} of {len(found)} tokens equal the CPU's"
    return f"{share:.1%} of {len(found)} tokens equal"


def _fits(drawn: Tensor, expected: Tensor) -> str:
    counts = torch.bincount(drawn.cpu(), minlength=len(expected))
    p = fit(counts, expected.double()).p
    assert p > LEVEL, f"the draws do not have the distribution: p = {p:.3g}"
    return f"p = {p:.2g}"
