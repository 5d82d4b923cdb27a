"""The cases, their order, and the misleading guesses."""

from __future__ import annotations

from benchmark.worst.cases import CASES, SPEC_BENCH, cells_of
from benchmark.worst.loads import GUESS_TOKENS, misleading


def test_passes_of_one_width_are_compared_on_spec_bench_alone() -> None:
    cells = cells_of([case.name for case in CASES], [1, 8], [2, 16], 1)
    for case in CASES:
        configs = [cell.config for cell in cells if (cell.case, cell.running) == (case.name, 8)]
        fixed = ["one-width", "width-2", "width-16"] if case.name == SPEC_BENCH else []
        assert configs == ["none", "adaptive", *fixed]


def test_every_other_round_is_served_in_reverse_order() -> None:
    cells = cells_of([SPEC_BENCH], [1, 8], [4], 2)
    order = [(cell.round, cell.running, cell.config) for cell in cells]
    assert order[8:] == [(2, *rest) for _, *rest in order[:8][::-1]]


def test_a_misleading_guess_has_the_whole_answer_with_a_wrong_token_after_each_part() -> None:
    answer = [7, 3, 9, 4, 7, 3]
    flat = misleading(answer, 10)
    copies = flat.count(None) + 1
    assert copies > 1
    guess = flat[: flat.index(None)]
    assert guess == [7, 3, 0, 3, 9, 5, 9, 4, 8, 4, 7, 4]
    assert flat == ([*guess, None] * copies)[:-1]


def test_misleading_guesses_stay_within_the_servers_limits() -> None:
    flat = misleading(list(range(3000)), 5000)
    assert len([token for token in flat if token is not None]) <= GUESS_TOKENS
