"""The options of `bench_batch_parallel`, and those that a resumed run may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import bench_batch_parallel
from benchmark.bench_batch_parallel import load_of, parse, server_settings
from benchmark.harness.journal import Journal, JournalError
from benchmark.parallel.plan import Cell

PROMPTS = [f"prompt {number}" for number in range(40)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--k", "0"],
        ["--in-flight", "3"],
        ["--rounds", "0"],
        ["--streaming-rounds", "-1"],
        ["--configs", "thirds"],
        ["--model", "m"],
        ["--sidecar-cores", "1"],
        ["--target-cores", "x"],
        ["--resume"],
    ],
)
def test_a_bad_option_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--dataset", "d.jsonl", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_repeated_numbers_are_served_once_and_in_order() -> None:
    options = parse(["--dataset", "d", "--k", "8", "2", "8", "--in-flight", "4", "1"])
    assert (options.k, options.in_flight) == ([2, 8], [1, 4])


def test_an_unreadable_dataset_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    models = ["--model", "m", "--draft-model", "d"]
    with pytest.raises(SystemExit, match=r"bench_batch_parallel: error: .*absent\.jsonl"):
        bench_batch_parallel.main(["--dataset", str(tmp_path / "absent.jsonl"), *models])


def test_a_run_can_be_resumed_with_other_numbers_but_not_with_other_lengths(tmp_path: Path) -> None:
    def opened(*arguments: str, resume: bool = True) -> None:
        models = ["--model", "m", "--draft-model", "d"]
        options = parse(["--dataset", "d", "--cpu", *models, *arguments])
        header = {**load_of(PROMPTS, options), **server_settings(options).shown}
        Journal.open(tmp_path, header, resume, Cell)

    opened("--k", "4", "--in-flight", "4", resume=False)
    opened("--k", "1", "8", "--rounds", "3")
    with pytest.raises(JournalError, match="max_new_tokens is 128, and 127 in this run"):
        opened("--max-new-tokens", "127")
