"""Drafts that do not pay cost almost nothing, on a simulated clock."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from benchmark.worst.loads import misleading
from sglang_qspec.trie import Source
from test.engine.simulation import VOCAB, Simulation

PLAIN_S = 0.025
LENGTH = 96


def cost(requests: int, width: float) -> float:
    """Seconds of a pass as on one core: the first 8 rows cost little, verification a constant."""
    rows = requests * width
    verifying = 0.0015 if width > 1 else 0.0
    return PLAIN_S * (1 + 0.01 * min(rows, 8) + 0.035 * max(0, rows - 8)) + verifying


def texts(name: str, count: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"{name} {n}": rng.choices(range(VOCAB), k=LENGTH) for n in range(count)}


def misled(answers: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    return {rid: {"qspec_guess_ids": misleading(text, VOCAB)} for rid, text in answers.items()}


def right(answers: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    return {rid: {"qspec_guess_ids": list(text)} for rid, text in answers.items()}


def plain_seconds(requests: int) -> float:
    return (LENGTH - 1) * cost(requests, 1)


def ratio(simulation: Simulation, requests: int, rounds: int) -> float:
    """Tokens per second with misleading guesses, relative to no speculation."""
    taken = 0.0
    for number in range(rounds):
        answers = texts(f"round {number}", requests, number)
        taken += simulation.serve(answers, misled(answers))
    return rounds * plain_seconds(requests) / taken


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_guesses_that_are_always_wrong_cost_almost_nothing(requests: int, ragged: bool) -> None:
    assert ratio(Simulation(cost, ragged=ragged), requests, rounds=4) >= 0.97


@pytest.mark.parametrize("ragged", [False, True])
def test_wrong_guesses_of_some_requests_and_right_ones_of_others(ragged: bool) -> None:
    """Each request gets what it deserves, and the last one ends about as early as without drafts.

    In passes of one width the rows of the right guesses are padding for the wrong ones, so that the
    requests with the wrong ones would end late.
    """
    alone, mixed = Simulation(cost, ragged=ragged), Simulation(cost, ragged=ragged)
    for number in range(4):
        good = texts(f"good {number}", 4, number)
        bad = texts(f"bad {number}", 4, 100 + number)
        apart = alone.serve(good, right(good))
        together = mixed.serve({**good, **bad}, {**right(good), **misled(bad)})
    assert alone.active.totals.accepted[Source.GUESS] > 0.8 * 4 * 4 * LENGTH
    assert apart < 0.5 * plain_seconds(4)
    if ragged:
        assert mixed.active.totals.accepted[Source.GUESS] > 0.8 * 4 * 4 * LENGTH
        assert max(map(mixed.ended.__getitem__, good)) < 0.5 * plain_seconds(8)
    assert together < (1.15 if ragged else 1.05) * plain_seconds(8)


@pytest.mark.parametrize("requests", [4, 16])
def test_lookups_of_some_requests_do_not_delay_the_end_of_the_others(requests: int) -> None:
    """All answers have one length, and an eighth to a half of each is copied from its own text."""

    def copying(count: int, seed: int) -> dict[str, list[int]]:
        rng, answers = random.Random(seed), {}
        for number in range(count):
            text = rng.choices(range(VOCAB), k=8)
            while len(text) < LENGTH:
                if rng.random() < (0.0, 0.2, 0.5, 0.9)[number % 4]:
                    at = rng.randrange(len(text) - 4)
                    text += text[at : at + 4 + rng.randrange(8)]
                else:
                    text += rng.choices(range(VOCAB), k=6)
            answers[f"{seed} {number}"] = text[:LENGTH]
        return answers

    def costly(requests: int, width: float) -> float:
        return 0.072 + 0.0064 * requests * width + (0.002 if width > 1 else 0.0)

    simulation = Simulation(costly)
    taken = [simulation.serve(copying(requests, seed)) for seed in range(10)]
    assert sum(taken[4:]) < 6 * (LENGTH - 1) * costly(requests, 1) / 0.955


@pytest.mark.parametrize("ragged", [False, True])
def test_good_guesses_are_used_again_after_the_bad_ones(ragged: bool) -> None:
    simulation = Simulation(cost, ragged=ragged)
    assert ratio(simulation, 8, rounds=6) >= 0.97
    simulation.clock.now += 400.0  # all pauses have ended by then
    for number in range(4):
        answers = texts(f"after {number}", 8, 50 + number)
        taken = simulation.serve(answers, right(answers))
    assert taken < 0.5 * plain_seconds(8)


@pytest.mark.parametrize("ragged", [False, True])
def test_passes_over_lines_are_short_while_chats_arrive(ragged: bool) -> None:
    """Right guesses give the lines wide passes, but each chat that comes waits for one pass."""
    simulation = Simulation(cost, ragged=ragged, ranks={f"chat {n}": (-1000, 0) for n in range(2)})
    lines, chats = texts("line", 2), texts("chat", 2)
    simulation.serve(lines, right(lines))
    assert simulation.longest > 1.5
    simulation.active.precedence.arrive(-1000)
    simulation.longest = 0.0
    simulation.serve(lines, right(lines))
    assert 1.0 < simulation.longest <= 1.3  # the times of passes are estimates
    simulation.serve(chats, right(chats))
    assert simulation.longest > 1.5


@pytest.mark.parametrize("ragged", [False, True])
def test_a_width_that_takes_too_long_is_not_used(ragged: bool) -> None:
    def steep(requests: int, width: float) -> float:
        return PLAIN_S * (0.2 + 0.8 * width * requests)

    simulation = Simulation(steep, ragged=ragged)
    answers: dict[str, Sequence[int]] = dict(texts("a", 2))
    for number in range(5):
        answers = dict(texts(f"a {number}", 2, number))
        taken = simulation.serve(answers, right({rid: list(t) for rid, t in answers.items()}))
    assert taken <= (LENGTH - 1) * steep(2, 1) * 1.03


def test_a_ragged_batch_serves_a_sure_request_beside_others_sooner() -> None:
    """One request of sixteen has good guesses; with one width, they pay for padding."""

    def taken(ragged: bool) -> float:
        simulation = Simulation(cost, ragged=ragged)
        seconds = 0.0
        for number in range(4):
            good, other = texts(f"good {number}", 1, number), texts(f"none {number}", 15, number)
            simulation.serve({**good, **other}, right(good))
            seconds += simulation.ended[f"good {number} 0"]
        return seconds

    assert taken(ragged=True) < 0.5 * taken(ragged=False)


@pytest.mark.parametrize("ragged", [True, False])
def test_a_chain_is_one_path_of_its_tree(ragged: bool) -> None:
    answers = texts("a", 2)
    both = {
        rid: {"qspec_guess_ids": [*text, None, *misleading(text, VOCAB)]}
        for rid, text in answers.items()
    }
    whole = Simulation(cost, ragged=ragged)
    paths = Simulation(cost, ragged=ragged, chains=True)
    assert whole.serve(answers, both) < 0.5 * plain_seconds(2)
    assert paths.serve(answers, both) < 0.5 * plain_seconds(2)
    assert whole.branching > 0
    assert paths.branching == 0
