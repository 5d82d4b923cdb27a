"""The draws have the filtered target distribution, and acceptance leaves it so."""

import pytest
import torch

from sglang_qspec.verify.accept import accept
from sglang_qspec.verify.sample import sample_targets
from sglang_qspec.verify.seeded import murmur_hash32

_DRAWS = 100_000
_LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])


def _expected(temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The filtered distribution, written out token by token."""
    probs = torch.softmax(_LOGITS.double() / temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if rank < top_k and mass <= top_p and probs[token] >= probs[order[0]] * min_p:
            kept.append(token)
        mass += probs[token]
    total = sum(probs[token] for token in kept)
    return torch.tensor([probs[t] / total if t in kept else 0.0 for t in range(len(probs))])


def _chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Per degree of freedom; impossible tokens must not occur at all."""
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    hoped = expected[possible] * counts.sum()
    freedom = max(int(possible.sum()) - 1, 1)
    return float(((counts[possible] - hoped) ** 2 / hoped).sum()) / freedom


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 6, 1.0, 0.0),
        (0.5, 6, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 6, 0.8, 0.0),
        (1.5, 6, 1.0, 0.2),
        (1.3, 5, 0.9, 0.05),
    ],
)
def test_draws_follow_the_filtered_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(7)
    rows = torch.ones(_DRAWS)
    drawn = sample_targets(
        _LOGITS.expand(_DRAWS, -1),
        rows * temperature,
        (rows * top_k).int() if top_k < 6 else None,
        rows * top_p if top_p < 1 else None,
        rows * min_p if min_p > 0 else None,
    )
    expected = _expected(temperature, top_k, top_p, min_p)
    assert _chi_square(torch.bincount(drawn, minlength=6), expected) < 4.0


def test_the_shortlist_gives_way_to_the_whole_vocabulary_when_filters_reach_further() -> None:
    torch.manual_seed(1)
    logits = torch.zeros(2000, 3000)
    drawn = sample_targets(logits, torch.ones(2000), top_ps=torch.full((2000,), 0.99))
    assert int((drawn >= 0).sum()) == 2000
    assert drawn.unique().numel() > 1200


def test_a_greedy_request_in_a_mixed_batch_gets_the_argmax() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    top_ks = torch.tensor([1, 50, 1, 50, 1])
    drawn = sample_targets(logits, torch.ones(5), top_ks)
    assert torch.equal(drawn[::2], logits[::2].argmax(-1))


def test_rows_are_filtered_by_their_own_settings() -> None:
    torch.manual_seed(3)
    logits = _LOGITS.expand(4000, -1)
    top_ks = torch.tensor([2, 6]).repeat(2000)
    drawn = sample_targets(logits, torch.ones(4000), top_ks).view(2000, 2)
    assert set(drawn[:, 0].tolist()) == {0, 1}
    assert set(drawn[:, 1].tolist()) == set(range(6))


def test_a_seed_repeats_its_draw_and_ignores_its_neighbours() -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    seeds, positions = torch.tensor([9, 9, 4, 9]), torch.tensor([3, 3, 3, 8])
    same = logits.clone()
    same[1] = same[0]
    drawn = sample_targets(same, torch.ones(4), seeds=seeds, positions=positions)
    assert drawn[0] == drawn[1]
    alone = sample_targets(same[2:3], torch.ones(1), seeds=seeds[2:3], positions=positions[2:3])
    assert drawn[2] == alone[0]


def test_seeded_draws_follow_the_distribution_over_positions() -> None:
    rows = 50_000
    drawn = sample_targets(
        _LOGITS.expand(rows, -1),
        torch.ones(rows),
        seeds=torch.full((rows,), 11),
        positions=torch.arange(rows),
    )
    expected = _expected(1.0, 6, 1.0, 0.0)
    assert _chi_square(torch.bincount(drawn, minlength=6), expected) < 4.0


def test_the_hash_is_murmur3_of_sixteen_bytes() -> None:
    def reference(seed: int, position: int, column: int) -> int:
        data = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
        data += column.to_bytes(4, "little")
        state = 0
        for start in range(0, 16, 4):
            word = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
            word = ((word << 15) | (word >> 17)) & 0xFFFFFFFF
            state ^= word * 0x1B873593 & 0xFFFFFFFF
            state = ((state << 13) | (state >> 19)) & 0xFFFFFFFF
            state = (state * 5 + 0xE6546B64) & 0xFFFFFFFF
        state ^= 16
        state = (state ^ (state >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        state = (state ^ (state >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        return state ^ (state >> 16)

    seeds = [0, 1, 2**40 + 17, 2**63 - 1]
    hashed = murmur_hash32(torch.tensor(seeds), torch.arange(4), torch.tensor([0, 49151]))
    assert hashed.tolist() == [
        [reference(s, p, c) for c in (0, 49151)] for p, s in enumerate(seeds)
    ]


def _speculate(rows: int, *, broken: bool) -> torch.Tensor:
    """First two tokens of a toy language model whose next logits depend on the last token.

    The drafts are a fixed tree with a bad guess, a good one and a continuation of each. The
    broken rule trusts a draft that the target finds likely instead of comparing it to the draw.
    """
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)) * 1.5
    tree = torch.tensor([[0, 3, 1, 2, 0]]).expand(rows, -1)
    parents = torch.tensor([[0, 0, 0, 2, 1]]).expand(rows, -1)
    logits = table[tree.flatten()]
    targets = sample_targets(logits, torch.ones(rows * 5)).view(rows, 5)
    if broken:
        likely = torch.softmax(table, -1)[tree.gather(1, parents), tree] > 0.2
        lucky = likely & (torch.rand(rows, 5) < 0.3) & (parents != torch.arange(5))
        for node in range(1, 5):
            parent = parents[:, node]
            chosen = targets.gather(1, parent.unsqueeze(1)).squeeze(1)
            chosen = torch.where(lucky[:, node], tree[:, node], chosen)
            targets = targets.scatter(1, parent.unsqueeze(1), chosen.unsqueeze(1))
    result = accept(tree, parents, targets, 5)
    last = (result.depths * result.on_path).argmax(1)
    first = targets[:, 0]
    follow = torch.where(result.accept_lens > 1, targets.gather(1, last.unsqueeze(1))[:, 0], 0)
    deep = result.accept_lens > 2
    middle = torch.zeros_like(first)
    for node in (1, 2):
        middle = torch.where(result.on_path[:, node], targets[:, node], middle)
    follow = torch.where(deep, middle, follow)
    # Where only the bonus token came out, the next step draws the second token plainly.
    plain = sample_targets(table[first], torch.ones(rows))
    second = torch.where(result.accept_lens > 1, follow, plain)
    return torch.bincount(first * 4 + second, minlength=16)


def _pair_distribution() -> torch.Tensor:
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)) * 1.5
    probs = torch.softmax(table.double(), -1)
    return (probs[0].unsqueeze(1) * probs).flatten()


def test_accepted_text_has_the_targets_distribution() -> None:
    torch.manual_seed(12)
    assert _chi_square(_speculate(_DRAWS, broken=False), _pair_distribution()) < 3.0


def test_the_statistic_catches_a_broken_acceptance_rule() -> None:
    torch.manual_seed(12)
    assert _chi_square(_speculate(_DRAWS, broken=True), _pair_distribution()) > 20.0
