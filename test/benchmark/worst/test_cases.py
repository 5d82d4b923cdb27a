"""The cases, their order, and the misleading guesses."""

from __future__ import annotations

from pathlib import Path

from benchmark.bench_worst_case import configuration
from benchmark.harness.cells import Cell
from benchmark.harness.configuration import Configuration, Settings
from benchmark.worst.cases import CASES, GUESSES, RANDOM, SIDECAR, SPEC_BENCH, cells_of
from benchmark.worst.loads import GUESS_TOKENS, misleading


def test_passes_of_one_width_are_compared_on_spec_bench_alone() -> None:
    cells = cells_of([case.name for case in CASES], [1, 8], [2, 16], 1)
    for case in CASES:
        configs = [
            cell.config for cell in cells if (cell["case"], cell["in_flight"]) == (case.name, 8)
        ]
        fixed = ["one-width", "width-2", "width-16"] if case.name == SPEC_BENCH else []
        assert configs == ["none", "adaptive", *fixed]


def test_all_but_the_misled_sidecar_share_a_server_and_target_cores_are_the_same() -> None:
    settings = Settings(Path("target"), Path("draft"), "bfloat16", 32, 3584, False, (0,), (1,))

    def one(case: str, config: str) -> Configuration:
        cell = Cell.of(1, config, case=case, in_flight=8)
        return configuration(cell, settings, "ipc:///wrong")

    assert one(GUESSES, "adaptive").server_key == one(SPEC_BENCH, "width-4").server_key
    assert one(GUESSES, "none").server_key == one(SIDECAR, "none").server_key
    misled = one(SIDECAR, "adaptive")
    assert "ipc:///wrong" in misled.flags
    assert misled.has_sidecar
    keys = {one(case, "adaptive").cores for case in (GUESSES, SIDECAR, RANDOM)}
    assert keys == {one(RANDOM, "none").cores} == {(0,)}


def test_a_misleading_guess_has_the_whole_answer_with_a_wrong_token_after_each_part() -> None:
    answer = [7, 3, 9, 4, 7, 3]
    flat = misleading(answer, 10)
    copies = flat.count(None) + 1
    assert copies > 1
    guess = flat[: flat.index(None)]
    assert guess == [7, 3, 0, 3, 9, 5, 9, 4, 8, 4, 7, 4]
    assert flat == ([*guess, None] * copies)[:-1]
    # A guess stays within the server's limits.
    flat = misleading(list(range(3000)), 5000)
    assert len([token for token in flat if token is not None]) <= GUESS_TOKENS
