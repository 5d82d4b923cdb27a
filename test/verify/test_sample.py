"""The draws follow the filtered target distribution, and acceptance preserves it."""

import pytest
import torch

from sglang_qspec.cpu.tree_links import links_from_parents
from sglang_qspec.messages import SeededSampling
from sglang_qspec.verify.accept import accept
from sglang_qspec.verify.gumbel_argmax import gumbel_argmax
from sglang_qspec.verify.rejection import Proposals
from sglang_qspec.verify.sample import Draws, distributions, rank_limit_of, sample_targets
from sglang_qspec.verify.seeded import gumbel, murmur_hash32
from test.verify.chi_square import chi_square

_DRAWS = 100_000
_LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])


def _expected(temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The filtered distribution, computed token by token."""
    probs = torch.softmax(_LOGITS.double() / temperature, -1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if rank < top_k and mass <= top_p and probs[token] >= probs[order[0]] * min_p:
            kept.append(token)
        mass += probs[token]
    total = sum(probs[token] for token in kept)
    return torch.tensor([probs[t] / total if t in kept else 0.0 for t in range(len(probs))])


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
@pytest.mark.parametrize("seeded", [False, True])
def test_draws_follow_the_filtered_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float, seeded: bool
) -> None:
    torch.manual_seed(7)
    count = _DRAWS // 4 if seeded else _DRAWS  # seeded draws take longer
    rows = torch.ones(count)
    drawn = sample_targets(
        _LOGITS.expand(count, -1),
        rows * temperature,
        Draws(
            (rows * top_k).int() if top_k < 6 else None,
            rows * top_p if top_p < 1 else None,
            rows * min_p if min_p > 0 else None,
            torch.full((count,), 5) if seeded else None,
            torch.arange(count),
        ),
    )
    expected = _expected(temperature, top_k, top_p, min_p)
    assert chi_square(torch.bincount(drawn, minlength=6), expected) < 4.0


@pytest.mark.parametrize("seeded", [False, True])
def test_draws_use_the_whole_vocabulary_when_filters_exceed_the_shortlist(
    seeded: bool,
) -> None:
    torch.manual_seed(1)
    logits = torch.zeros(2000, 3000)
    seeds = torch.arange(2000) if seeded else None
    draws = Draws(top_ps=torch.full((2000,), 0.99), seeds=seeds, positions=torch.arange(2000))
    drawn = sample_targets(logits, torch.ones(2000), draws)
    assert int((drawn >= 0).sum()) == 2000
    assert drawn.unique().numel() > 1200


def test_a_greedy_request_in_a_mixed_batch_gets_the_argmax() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    top_ks = torch.tensor([1, 50, 1, 50, 1])
    drawn = sample_targets(logits, torch.ones(5), Draws(top_ks))
    assert torch.equal(drawn[::2], logits[::2].argmax(-1))


def test_each_row_is_filtered_by_its_own_settings() -> None:
    torch.manual_seed(3)
    logits = _LOGITS.expand(4000, -1)
    top_ks = torch.tensor([2, 6]).repeat(2000)
    drawn = sample_targets(logits, torch.ones(4000), Draws(top_ks)).view(2000, 2)
    assert set(drawn[:, 0].tolist()) == {0, 1}
    assert set(drawn[:, 1].tolist()) == set(range(6))


def test_a_seed_repeats_its_draw_and_ignores_its_neighbours() -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    seeds, positions = torch.tensor([9, 9, 4, 9]), torch.tensor([3, 3, 3, 8])
    same = logits.clone()
    same[1] = same[0]
    # The filter of the last row must not change the others.
    draws = Draws(torch.tensor([64, 64, 64, 3]), seeds=seeds, positions=positions)
    drawn = sample_targets(same, torch.ones(4), draws)
    assert drawn[0] == drawn[1]
    alone = Draws(seeds=seeds[2:3], positions=positions[2:3])
    assert drawn[2] == sample_targets(same[2:3], torch.ones(1), alone)[0]


def _gumbel_maxima(weights: torch.Tensor, seeds: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The draws of SGLang's `multinomial_with_seed`: the largest sum of noise and log weight."""
    noise = gumbel(murmur_hash32(seeds, at, torch.arange(weights.shape[1])))
    return (noise + weights.double().log()).argmax(-1)


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 3.0, 30.0])
def test_the_bounded_search_finds_the_gumbel_maximum(sharpness: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.softmax(torch.randn(400, 2500, generator=generator) * sharpness, -1)
    weights[::3, 40:] = 0.0
    seeds = torch.randint(-(2**63), 2**63 - 1, (400,), generator=generator)
    at = torch.arange(400) * 7
    assert torch.equal(gumbel_argmax(weights, seeds, at), _gumbel_maxima(weights, seeds, at))


def test_the_bounded_search_ends_on_nan() -> None:
    assert (
        len(gumbel_argmax(torch.full((1, 9), torch.nan), torch.tensor([1]), torch.tensor([1]))) == 1
    )


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_equal_seeds_draw_equal_tokens_as_often_as_distributions_overlap(top_p: float) -> None:
    rows = 10_000
    logits = torch.randn(50, generator=torch.Generator().manual_seed(4)) * 2
    near = logits + torch.randn(50, generator=torch.Generator().manual_seed(5)) * 0.3

    def draw(logits: torch.Tensor, seed: int) -> torch.Tensor:
        top_ps = torch.full((rows,), top_p) if top_p < 1 else None
        draws = Draws(top_ps=top_ps, seeds=torch.full((rows,), seed), positions=torch.arange(rows))
        return sample_targets(logits.expand(rows, -1), torch.ones(rows), draws)

    distance = (torch.softmax(logits, -1) - torch.softmax(near, -1)).abs().sum() / 2
    assert 0.05 < distance < 0.3
    alike = (draw(logits, 1) == draw(near, 1)).float().mean()
    apart = (draw(logits, 1) == draw(near, 2)).float().mean()
    assert alike > (1 - distance) / (1 + distance) - 0.02
    assert apart < 0.5 * alike


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
    own = murmur_hash32(torch.tensor(seeds), torch.arange(4), torch.tensor([[5], [6], [7], [8]]))
    assert own[:, 0].tolist() == [reference(s, p, 5 + p) for p, s in enumerate(seeds)]


def _speculate(rows: int, *, broken: bool) -> torch.Tensor:
    """First two tokens of a toy language model whose next logits depend on the last token.

    The drafts are a fixed tree with a bad guess, a good one and a continuation of each. The
    broken rule sometimes accepts a likely draft without comparing it to the draw.
    """
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)) * 1.5
    tree = torch.tensor([[0, 3, 1, 2, 0]]).expand(rows, -1)
    parents = torch.tensor([[0, 0, 0, 2, 1]]).expand(rows, -1)
    logits = table[tree.flatten()]
    targets = sample_targets(logits, torch.ones(rows * 5), Draws()).view(rows, 5)
    if broken:
        likely = torch.softmax(table, -1)[tree.gather(1, parents), tree] > 0.2
        lucky = likely & (torch.rand(rows, 5) < 0.3) & (parents != torch.arange(5))
        for node in range(1, 5):
            parent = parents[:, node]
            chosen = targets.gather(1, parent.unsqueeze(1)).squeeze(1)
            chosen = torch.where(lucky[:, node], tree[:, node], chosen)
            targets = targets.scatter(1, parent.unsqueeze(1), chosen.unsqueeze(1))
    children, siblings = links_from_parents(parents)
    paths = accept(tree.tolist(), children.tolist(), siblings.tolist(), targets.tolist(), 5)
    first = targets[:, 0]
    # If only the bonus token was accepted, the next pass draws the second token plainly.
    alone = torch.tensor([len(path) == 1 for path in paths])
    accepted = torch.tensor([path[1] if len(path) > 1 else 0 for path in paths])
    plain = sample_targets(table[first], torch.ones(rows), Draws())
    second = torch.where(alone, plain, targets.gather(1, accepted.unsqueeze(1))[:, 0])
    return torch.bincount(first * 4 + second, minlength=16)


def _pair_distribution() -> torch.Tensor:
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(2)) * 1.5
    probs = torch.softmax(table.double(), -1)
    return (probs[0].unsqueeze(1) * probs).flatten()


def test_accepted_text_follows_the_targets_distribution() -> None:
    torch.manual_seed(12)
    assert chi_square(_speculate(_DRAWS, broken=False), _pair_distribution()) < 3.0


def test_the_statistic_catches_a_broken_acceptance_rule() -> None:
    torch.manual_seed(12)
    assert chi_square(_speculate(_DRAWS, broken=True), _pair_distribution()) > 20.0


def _near(rows: int, known: torch.Tensor, drafter: torch.Tensor) -> Proposals:
    """Proposals drawn from one distribution over all tokens; `known` marks the valid rows."""
    token_ids = torch.multinomial(drafter, rows, replacement=True)
    everyone = torch.arange(len(drafter)).expand(rows, -1)
    return Proposals(known, token_ids, everyone, drafter.expand(rows, -1))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 6, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 6, 0.8, 0.0), (1.3, 5, 0.9, 0.05)],
)
def test_draws_with_proposals_follow_the_filtered_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(7)
    rows, drafter = torch.ones(_DRAWS), torch.tensor([0.05, 0.3, 0.3, 0.1, 0.05, 0.2])
    proposals = _near(_DRAWS, rows.bool(), drafter)
    draws = Draws(
        (rows * top_k).int(), rows * top_p, rows * min_p, torch.arange(_DRAWS), rows.long()
    )
    drawn = sample_targets(
        _LOGITS.expand(_DRAWS, -1), rows * temperature, draws._replace(proposals=proposals)
    )
    expected = _expected(temperature, top_k, top_p, min_p)
    assert chi_square(torch.bincount(drawn, minlength=6), expected) < 4.0
    kept = (drawn == proposals.token_ids).float().mean()
    assert kept == pytest.approx(float(torch.minimum(expected, drafter).sum()), abs=0.01)


@pytest.mark.parametrize("vocab", [50, 3000])
def test_rows_without_a_proposal_are_not_changed_by_rows_with_one(vocab: int) -> None:
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))
    known = torch.arange(40) % 3 == 0
    draws = Draws(
        torch.tensor([1, vocab, vocab, 7]).repeat(10),
        torch.tensor([1.0, 1.0, 0.9, 0.99, 1.0]).repeat(8),
        seeds=torch.arange(40),
        positions=torch.arange(40),
    )
    alone = sample_targets(logits, torch.ones(40), draws)
    proposals = _near(40, known & (draws.top_ks != 1), torch.full((vocab,), 1 / vocab))
    near = sample_targets(logits, torch.ones(40), draws._replace(proposals=proposals))
    assert torch.equal(near[~known], alone[~known])
    assert torch.equal(near[::4], logits[::4].argmax(-1))
    assert not torch.equal(near, alone)


def test_filtered_distributions_extend_beyond_the_shortlist() -> None:
    probs = torch.full((2, 3000), 1 / 3000)
    left = distributions(probs, Draws(top_ps=torch.tensor([0.9, 1.0])))
    assert left.sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert int((left > 0).sum(1)[0]) == pytest.approx(2700, abs=2)
    assert torch.equal(left[1], probs[1])


def test_the_rank_limit_is_the_largest_top_k_of_the_requests_with_a_filter() -> None:
    plain = SeededSampling(0, 1.0)
    narrow, wide = (SeededSampling(0, 1.0, top_k=top_k) for top_k in (5, 40))
    assert rank_limit_of([plain, narrow, wide]) == 40
    assert rank_limit_of([plain]) is None
    assert rank_limit_of([narrow, SeededSampling(0, 1.0, top_p=0.9)]) is None
    assert rank_limit_of([narrow, SeededSampling(0, 1.0, min_p=0.1)]) is None
