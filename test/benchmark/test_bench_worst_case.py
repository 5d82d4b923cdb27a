"""The options of `bench_worst_case`, and its servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.bench_worst_case import configuration, parse
from benchmark.harness.configuration import Configuration, Settings
from benchmark.worst.cases import GUESSES, RANDOM, SIDECAR, SPEC_BENCH, Cell

SETTINGS = Settings(Path("target"), Path("draft"), "bfloat16", 32, 3584, False, (0,), (1,))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cases", "spec-bench"],
        ["--levels", "33"],
        ["--widths", "1"],
        ["--widths", "17"],
        ["--rounds", "0"],
        ["--cases", "sunshine"],
        ["--resume"],
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_spec_bench_is_served_if_a_dataset_is_given() -> None:
    assert SPEC_BENCH not in parse([]).cases
    assert SPEC_BENCH in parse(["--dataset", "d.jsonl"]).cases


def test_all_but_the_misled_sidecar_share_a_server_and_target_cores_are_the_same() -> None:
    def one(case: str, config: str) -> Configuration:
        return configuration(Cell(1, case, 8, config), SETTINGS, "ipc:///wrong")

    assert one(GUESSES, "adaptive").server_key == one(SPEC_BENCH, "width-4").server_key
    assert one(GUESSES, "none").server_key == one(SIDECAR, "none").server_key
    misled = one(SIDECAR, "adaptive")
    assert "ipc:///wrong" in misled.flags
    assert misled.has_sidecar
    keys = {one(case, "adaptive").cores for case in (GUESSES, SIDECAR, RANDOM)}
    assert keys == {one(RANDOM, "none").cores} == {(0,)}
