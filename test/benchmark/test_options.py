"""Every benchmark refuses an option that is not allowed, and names it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmark.bench_batch_parallel import parse as parse_parallel
from benchmark.bench_batch_parallel import server_settings, shown_of
from benchmark.bench_worst_case import parse as parse_worst
from benchmark.harness.journal import Journal, JournalError
from benchmark.worst.cases import SPEC_BENCH

DATASET = ("--dataset", "d.jsonl")
SERVERS = ("--model m", "--sidecar-cores 1", "--target-cores x", "--resume")
REFUSED = {
    "bench_queue": ("--slots 0", "--request-rate 0", "--configs qspec-3", *SERVERS),
    "bench_batch_parallel": (
        *("--k 0", "--in-flight 3", "--rounds 0", "--streaming-rounds -1", "--configs thirds"),
        *SERVERS,
    ),
    "bench_worst_case": (
        *("--levels 33", "--widths 1", "--widths 17", "--rounds 0", "--cases sunshine"),
        *SERVERS,
    ),
    "bench_peers": (
        *("--llama-server path", "--configs vllm", "--levels 0", "--prompts 0", "--spread 1.5"),
        *("--arrivals flood", "--samplings best", "--idle -1"),
        *SERVERS,
    ),
    "bench_soak": (
        *("--minutes 0", "--minutes inf", "--in-flight 9 8", "--in-flight 0 8", "--templates 0"),
        "--target-cores x",
    ),
}
MESSAGES = {
    "bench_soak --minutes 0": "must be a number above 0",
    "bench_soak --minutes inf": "--minutes must be finite",
    "bench_soak --in-flight 9 8": "LOW must be at most HIGH",
    "bench_soak --in-flight 0 8": "must be a whole number from 1",
    "bench_soak --target-cores x": "'x' must be",
}
"""What a refusal says; without an entry it at least names the option."""
WITHOUT_DATASET = ("bench_soak",)


@pytest.mark.parametrize(
    ("benchmark", "text"), [(name, text) for name, texts in REFUSED.items() for text in texts]
)
def test_a_bad_option_is_refused(
    benchmark: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*(() if benchmark in WITHOUT_DATASET else DATASET), *text.split()]
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmark.{benchmark}").parse(arguments)
    assert MESSAGES.get(f"{benchmark} {text}", text.split()[0]) in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", ["bench_queue", "bench_batch_parallel"])
def test_an_unreadable_dataset_ends_the_command_with_one_sentence(
    benchmark: str, tmp_path: Path
) -> None:
    models = ["--model", "m", "--draft-model", "d"]
    absent = ["--dataset", str(tmp_path / "absent.jsonl")]
    with pytest.raises(SystemExit, match=rf"{benchmark}: error: .*absent\.jsonl"):
        importlib.import_module(f"benchmark.{benchmark}").main([*absent, *models])


def test_spec_bench_is_served_if_a_dataset_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert SPEC_BENCH not in parse_worst([]).cases
    assert SPEC_BENCH in parse_worst(["--dataset", "d.jsonl"]).cases
    with pytest.raises(SystemExit):
        parse_worst(["--cases", SPEC_BENCH])
    assert "--cases spec-bench needs a --dataset" in capsys.readouterr().err


def test_repeated_numbers_are_served_once_and_in_order() -> None:
    options = parse_parallel(["--dataset", "d", "--k", "8", "2", "8", "--in-flight", "4", "1"])
    assert (options.k, options.in_flight) == ([2, 8], [1, 4])


def test_a_run_can_be_resumed_with_other_numbers_but_not_with_other_lengths(tmp_path: Path) -> None:
    def opened(*arguments: str, resume: bool = True) -> None:
        models = ["--model", "m", "--draft-model", "d"]
        options = parse_parallel(["--dataset", "d", "--cpu", *models, *arguments])
        shown = {name: str(value) for name, value in shown_of(options).items()}
        Journal.open(tmp_path, {**shown, **server_settings(options).shown}, resume)

    opened("--k", "4", "--in-flight", "4", resume=False)
    opened("--k", "1", "8", "--rounds", "3")
    with pytest.raises(JournalError, match="max_new_tokens is 128, and 127 in this run"):
        opened("--max-new-tokens", "127")
