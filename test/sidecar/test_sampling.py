from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sglang_qspec.messages import MAX_CANDIDATES, SeededSampling
from sglang_qspec.sidecar.sampler import Sampler, choose
from sglang_qspec.sidecar.sampling import GREEDY, Sampling, seed_of, uniforms
from sglang_qspec.transfers import to_device
from sglang_qspec.verify.sample import Draws, sample_targets
from test.verify.chi_square import chi_square
from test.verify.fake_cuda import CUDA, fake_cuda


def tokens_of(
    logits: torch.Tensor,
    samplings: Sequence[Sampling | SeededSampling],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    return choose(logits, samplings, seeds, positions).token_ids


def test_greedy_rows_are_the_argmax_and_the_lowest_id_wins_a_tie() -> None:
    logits = torch.randn(20, 1000)
    logits[3, [900, 17, 400]] = 50.0
    assert tokens_of(logits, [GREEDY] * 20, [0] * 20, [0] * 20) == logits.argmax(-1).tolist()
    assert tokens_of(logits.bfloat16(), [GREEDY] * 20, [0] * 20, [0] * 20)[3] == 17


@pytest.mark.parametrize("vocab", [2, 63, 64, 1000])
def test_second_choices_are_the_likeliest_of_the_other_tokens(vocab: int) -> None:
    logits = torch.randn(40, vocab)
    logits[3], logits[4, :2] = 1.0, 50.0
    samplings = [Sampling(0.8) if row % 3 == 0 else GREEDY for row in range(40)]
    samplings[3] = GREEDY
    chosen = choose(logits, samplings, [0] * 40, [0] * 40, seconds=True)
    assert set(chosen.second_ids) == {row for row in range(40) if samplings[row] == GREEDY}
    for row, second in chosen.second_ids.items():
        others = logits[row].index_fill(0, torch.tensor(chosen.token_ids[row]), -float("inf"))
        assert second == int(others.argmax())
    assert choose(logits, samplings, [0] * 40, [0] * 40).second_ids == {}


def test_second_choices_are_within_the_vocabulary_of_their_target() -> None:
    logits = torch.randn(3, 500)
    chosen = choose(logits, [GREEDY] * 3, [0] * 3, [0] * 3, [500, 70, 1], seconds=True)
    assert chosen.second_ids[1] == int(logits[1, :70].argsort(descending=True)[1])
    assert chosen.second_ids[2] == 0


def test_draws_stay_within_a_vocabulary_that_is_no_multiple_of_the_block() -> None:
    logits = torch.full((50, 70), -1.0)
    tokens = tokens_of(logits, [Sampling(2.0)] * 50, list(range(50)), [0] * 50)
    assert max(tokens) < 70
    assert max(tokens) >= 64


def test_drawn_tokens_follow_the_distribution_at_their_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -float("inf"), 3.0]]).expand(20000, -1)
    for temperature in (0.5, 1.0):
        tokens = tokens_of(logits, [Sampling(temperature)] * 20000, list(range(20000)), [7] * 20000)
        drawn = torch.bincount(torch.tensor(tokens), minlength=5) / 20000
        expected = torch.softmax(logits[0] / temperature, -1)
        assert (drawn - expected).abs().max() < 0.015


def test_top_p_keeps_the_likeliest_tokens_and_their_proportions() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.3, 0.05, 0.2])
    logits = probabilities.log().expand(20000, -1)
    for top_p, kept in ((0.0, [1]), (0.4, [1]), (0.41, [1, 2]), (0.69, [1, 2]), (0.85, [1, 2, 4])):
        tokens = tokens_of(logits, [Sampling(1.0, top_p)] * 20000, list(range(20000)), [7] * 20000)
        assert set(tokens) == set(kept)
        drawn = torch.bincount(torch.tensor(tokens), minlength=5)[kept] / 20000
        assert (drawn - probabilities[kept] / probabilities[kept].sum()).abs().max() < 0.015


def test_a_row_without_top_p_is_not_changed_by_rows_with_it() -> None:
    logits = torch.randn(6, 500)
    plain = tokens_of(logits, [Sampling(0.8)] * 6, list(range(6)), [4] * 6)
    some = [Sampling(0.8, 0.5 if i % 2 else 1.0) for i in range(6)]
    assert tokens_of(logits, some, list(range(6)), [4] * 6)[::2] == plain[::2]


def test_a_draw_depends_on_its_own_row_alone() -> None:
    logits = torch.randn(6, 500)
    alone = [tokens_of(logits[i : i + 1], [Sampling(0.8)], [i], [4])[0] for i in range(6)]
    assert tokens_of(logits, [Sampling(0.8)] * 6, list(range(6)), [4] * 6) == alone
    mixed = tokens_of(
        logits, [Sampling(t) for t in (0.8, 0.0, 0.8, 0.0, 0.8, 0.8)], list(range(6)), [4] * 6
    )
    assert [mixed[i] for i in (0, 2, 4, 5)] == [alone[i] for i in (0, 2, 4, 5)]


def test_a_seeded_row_is_drawn_like_the_targets_whatever_the_other_rows_are() -> None:
    logits = torch.randn(6, 500) * 2
    seeded = [
        SeededSampling(7, 0.9),
        SeededSampling(-8, 1.3, top_k=5),
        SeededSampling(7, 0.9, top_p=0.8),
        SeededSampling(9, 2.0, min_p=0.1),
    ]
    seeds = torch.tensor([each.seed for each in seeded])
    draws = Draws(
        torch.tensor([500, 5, 500, 500]),
        torch.tensor([1.0, 1.0, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.1]),
        seeds,
        torch.tensor([40, 41, 40, 43]),
    )
    expected = sample_targets(logits[:4], torch.tensor([0.9, 1.3, 0.9, 2.0]), draws).tolist()
    tokens = tokens_of(logits, [*seeded, GREEDY, Sampling(0.8)], [1] * 6, [40, 41, 40, 43, 44, 45])
    assert tokens[:4] == expected
    assert tokens[4] == int(logits[4].argmax())
    assert tokens[5] == tokens_of(logits[5:], [Sampling(0.8)], [1], [45])[0]


def test_random_numbers_differ_by_seed_and_position_and_are_uniform() -> None:
    seeds = [seed_of([1, 2, 3], i) for i in range(100)]
    numbers = torch.from_numpy(uniforms(seeds, np.arange(100)[:, None])).flatten()
    assert len(numbers.unique()) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02


def test_seeds_repeat_from_run_to_run_and_differ_between_completions_and_prompts() -> None:
    assert seed_of([1, 2, 3], 1) == 8528891393909727461
    assert len({seed_of([1, 2, 3], 1), seed_of([1, 2, 3], 2), seed_of([1, 2, 4], 1)}) == 3


def with_probabilities(temperature: float = 1.0, **filters: Any) -> SeededSampling:
    """Sampling parameters of a target that asks for the probabilities of the candidates."""
    return SeededSampling(0, temperature, probabilities=True, **filters)


def test_a_token_with_probabilities_is_drawn_from_the_reported_candidates() -> None:
    count = 20_000
    logits = (torch.arange(100) * 0.1).expand(count, -1)
    chosen = choose(logits, [with_probabilities(temperature=2.0)] * count, [0] * count, [0] * count)
    candidates = chosen.candidates[0]
    assert sorted(chosen.candidates) == list(range(count))
    assert candidates.token_ids == list(range(99, 99 - MAX_CANDIDATES, -1))
    expected = torch.softmax(logits[0] / 2.0, -1)[candidates.token_ids]
    expected = expected.double() / expected.sum()
    assert torch.allclose(torch.tensor(candidates.probs, dtype=torch.float64), expected)
    counts = torch.bincount(torch.tensor(chosen.token_ids), minlength=100)[candidates.token_ids]
    assert int(counts.sum()) == count
    assert chi_square(counts, expected) < 1.8


def test_reported_candidates_are_those_that_pass_the_targets_filters() -> None:
    probs = torch.tensor([0.05, 0.4, 0.3, 0.05, 0.2])
    filters: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.45}, {}]
    chosen = choose(
        probs.log().expand(4, -1), [with_probabilities(**f) for f in filters], [0] * 4, [0] * 4
    )
    kept = [chosen.candidates[row] for row in range(4)]
    assert [len(candidates.token_ids) for candidates in kept] == [2, 3, 3, 5]
    for token, candidates in zip(chosen.token_ids, kept, strict=True):
        assert token in candidates.token_ids
        assert min(candidates.probs) > 0
        assert abs(sum(candidates.probs) - 1) < 1e-9
    assert torch.allclose(torch.tensor(kept[1].probs), probs[[1, 2, 4]] / probs[[1, 2, 4]].sum())


def test_draws_with_probabilities_use_neither_the_seed_nor_torchs_generator() -> None:
    logits = torch.zeros(50, 1000)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(tokens_of(logits, [with_probabilities()] * 50, [3] * 50, list(range(50))))
    assert drawn[0] != drawn[1]


def test_rows_with_probabilities_mix_with_others_and_nan_logits_give_a_token() -> None:
    logits = torch.randn(4, 500)
    logits[3] = torch.nan
    chosen = choose(
        logits,
        [GREEDY, with_probabilities(), SeededSampling(7, 0.9), with_probabilities()],
        [0] * 4,
        [9] * 4,
    )
    assert sorted(chosen.candidates) == [1, 3]
    assert chosen.token_ids[0] == int(logits[0].argmax())
    assert chosen.token_ids[2] == tokens_of(logits[2:3], [SeededSampling(7, 0.9)], [0], [9])[0]
    assert chosen.candidates[3].probs == [1.0]
    assert chosen.candidates[3].token_ids == [chosen.token_ids[3]]


def test_seeded_rows_with_a_top_k_are_drawn_without_a_wait_for_the_device() -> None:
    seeded = [SeededSampling(7, 0.9, top_k=5, top_p=0.8), SeededSampling(8, 1.0)]
    with fake_cuda() as costs:
        sampler = Sampler(seeded, [0, 0], [40, 41])
        sampler.put(to_device(CUDA, *sampler.arrays))
        drawn = sampler.draw(torch.randn(2, 5000, device=CUDA))
    assert drawn.device == CUDA
    assert not costs.synchronisations


SEEDED: list[SeededSampling] = [
    SeededSampling(7, 0.9),
    SeededSampling(-8, 1.3, top_k=5),
    SeededSampling(9, 0.7, top_p=0.8),
    SeededSampling(10, 2.0, min_p=0.05),
    SeededSampling(11, 1.0, top_k=1190),
]


def padded(logits: torch.Tensor, size: int, value: float) -> torch.Tensor:
    """`logits` [n, vocab] with further token ids up to `size`, all with the logit `value`."""
    return torch.nn.functional.pad(logits, (0, size - logits.shape[1]), value=value)


def drawn_by_target(logits: torch.Tensor, seeded: list[SeededSampling], place: int) -> list[int]:
    """The tokens that a target draws from `logits` [n, vocab] at one position of the text."""
    draws = Draws(
        torch.tensor([each.top_k for each in seeded]),
        torch.tensor([each.top_p for each in seeded]),
        torch.tensor([each.min_p for each in seeded]),
        torch.tensor([each.seed for each in seeded]),
        torch.tensor([place] * len(seeded)),
    )
    temperatures = torch.tensor([each.temperature for each in seeded])
    return sample_targets(logits, temperatures, draws).tolist()


@pytest.mark.parametrize(("target_size", "draft_size"), [(1230, 1300), (1300, 1230), (1280, 1216)])
def test_a_seeded_draw_is_the_targets_although_either_pads_its_vocabulary(
    target_size: int, draft_size: int
) -> None:
    """Padding is unlikely in the target, and the likeliest of all in the draft model."""
    generator = torch.Generator().manual_seed(5)
    shared = min(target_size, draft_size)
    for place in range(40):
        logits = torch.randn(len(SEEDED), shared, generator=generator) * 3
        target = drawn_by_target(padded(logits, target_size, -30.0), SEEDED, place)
        count = len(SEEDED)
        draft = choose(
            padded(logits, draft_size, 30.0),
            SEEDED,
            [0] * count,
            [place] * count,
            [target_size] * count,
        )
        assert draft.token_ids == target


def test_ids_that_the_target_lacks_are_drafted_by_no_kind_of_sampling() -> None:
    kinds: list[Sampling | SeededSampling] = [GREEDY, Sampling(1.0), Sampling(1.0, 0.9), *SEEDED]
    kinds += [with_probabilities(), with_probabilities(top_k=3)]
    logits = padded(torch.randn(len(kinds), 300), 350, 20.0)
    logits[1] = torch.nan
    for size in (300, 297):
        for place in range(20):
            chosen = choose(
                logits, kinds, range(len(kinds)), [place] * len(kinds), [size] * len(kinds)
            )
            assert max(chosen.token_ids) < size
            assert sorted(chosen.candidates) == [8, 9]
            assert all(max(each.token_ids) < size for each in chosen.candidates.values())
            assert all(sum(each.probs) == pytest.approx(1) for each in chosen.candidates.values())


def test_rows_of_targets_with_several_vocabulary_sizes_are_drawn_as_if_alone() -> None:
    kinds: list[Sampling | SeededSampling] = [GREEDY, *SEEDED, Sampling(0.8), GREEDY]
    kinds.append(with_probabilities(top_k=1))
    logits = torch.randn(len(kinds), 500) * 2
    sizes = [(500, 130, 1 << 31)[row % 3] for row in range(len(kinds))]
    seeds, places = list(range(len(kinds))), [4] * len(kinds)
    chosen = choose(logits, kinds, seeds, places, sizes)
    for row, size in enumerate(sizes):
        alone = choose(logits[row : row + 1, :size], [kinds[row]], [seeds[row]], [4])
        assert chosen.token_ids[row] == alone.token_ids[0]
        assert chosen.candidates.get(row) == alone.candidates.get(0)
    assert sorted(chosen.candidates) == [8]
    assert any(size > 130 <= token for size, token in zip(sizes, chosen.token_ids, strict=True))
