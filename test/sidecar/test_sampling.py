import torch

from sglang_qspec.messages import Dice
from sglang_qspec.sidecar.sampling import GREEDY, Sampling, choose, seed_of, uniforms
from sglang_qspec.verify.sample import Draws, sample_targets


def test_greedy_rows_are_the_argmax_and_the_lowest_id_wins_a_tie() -> None:
    logits = torch.randn(20, 1000)
    logits[3, [900, 17, 400]] = 50.0
    assert choose(logits, [GREEDY] * 20, [0] * 20, [0] * 20) == logits.argmax(-1).tolist()
    assert choose(logits.bfloat16(), [GREEDY] * 20, [0] * 20, [0] * 20)[3] == 17


def test_a_vocabulary_that_is_no_multiple_of_the_block_is_never_left() -> None:
    logits = torch.full((50, 70), -1.0)
    tokens = choose(logits, [Sampling(2.0)] * 50, list(range(50)), [0] * 50)
    assert max(tokens) < 70
    assert max(tokens) >= 64


def test_drawn_tokens_follow_the_distribution_at_their_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -float("inf"), 3.0]]).expand(20000, -1)
    for temperature in (0.5, 1.0):
        tokens = choose(logits, [Sampling(temperature)] * 20000, list(range(20000)), [7] * 20000)
        drawn = torch.bincount(torch.tensor(tokens), minlength=5) / 20000
        expected = torch.softmax(logits[0] / temperature, -1)
        assert (drawn - expected).abs().max() < 0.015


def test_top_p_keeps_to_the_likeliest_tokens_and_to_their_proportions() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.3, 0.05, 0.2])
    logits = probabilities.log().expand(20000, -1)
    for top_p, kept in ((0.0, [1]), (0.4, [1]), (0.41, [1, 2]), (0.69, [1, 2]), (0.85, [1, 2, 4])):
        tokens = choose(logits, [Sampling(1.0, top_p)] * 20000, list(range(20000)), [7] * 20000)
        assert set(tokens) == set(kept)
        drawn = torch.bincount(torch.tensor(tokens), minlength=5)[kept] / 20000
        assert (drawn - probabilities[kept] / probabilities[kept].sum()).abs().max() < 0.015


def test_a_row_without_top_p_is_drawn_as_if_no_other_had_it() -> None:
    logits = torch.randn(6, 500)
    plain = choose(logits, [Sampling(0.8)] * 6, list(range(6)), [4] * 6)
    some = [Sampling(0.8, 0.5 if i % 2 else 1.0) for i in range(6)]
    assert choose(logits, some, list(range(6)), [4] * 6)[::2] == plain[::2]


def test_a_draw_depends_on_its_own_row_alone() -> None:
    logits = torch.randn(6, 500)
    alone = [choose(logits[i : i + 1], [Sampling(0.8)], [i], [4])[0] for i in range(6)]
    assert choose(logits, [Sampling(0.8)] * 6, list(range(6)), [4] * 6) == alone
    mixed = choose(
        logits, [Sampling(t) for t in (0.8, 0.0, 0.8, 0.0, 0.8, 0.8)], list(range(6)), [4] * 6
    )
    assert [mixed[i] for i in (0, 2, 4, 5)] == [alone[i] for i in (0, 2, 4, 5)]


def test_a_row_with_dice_is_drawn_as_the_target_would_draw_it_whatever_is_beside_it() -> None:
    logits = torch.randn(6, 500) * 2
    dice = [Dice(7, 0.9), Dice(-8, 1.3, top_k=5), Dice(7, 0.9, top_p=0.8), Dice(9, 2.0, min_p=0.1)]
    seeds = torch.tensor([each.seed for each in dice])
    draws = Draws(
        torch.tensor([500, 5, 500, 500]),
        torch.tensor([1.0, 1.0, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.1]),
        seeds,
        torch.tensor([40, 41, 40, 43]),
    )
    expected = sample_targets(logits[:4], torch.tensor([0.9, 1.3, 0.9, 2.0]), draws).tolist()
    tokens = choose(logits, [*dice, GREEDY, Sampling(0.8)], [1] * 6, [40, 41, 40, 43, 44, 45])
    assert tokens[:4] == expected
    assert tokens[4] == int(logits[4].argmax())
    assert tokens[5] == choose(logits[5:], [Sampling(0.8)], [1], [45])[0]


def test_the_numbers_behind_draws_differ_by_seed_and_position_and_are_uniform() -> None:
    seeds = [seed_of([1, 2, 3], i) for i in range(100)]
    numbers = torch.cat([uniforms(seeds, [position] * 100) for position in range(100)])
    assert len(numbers.unique()) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02


def test_seeds_repeat_from_run_to_run_and_differ_between_completions_and_prompts() -> None:
    assert seed_of([1, 2, 3], 1) == 12104061258568624709
    assert len({seed_of([1, 2, 3], 1), seed_of([1, 2, 3], 2), seed_of([1, 2, 4], 1)}) == 3
