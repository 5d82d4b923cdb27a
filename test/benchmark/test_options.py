"""Every benchmark refuses an option that is not allowed, and names it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmark.bench_worst_case import parse as parse_worst
from benchmark.worst.cases import SPEC_BENCH

DATASET = ("--dataset", "d.jsonl")
SERVERS = ("--model m", "--sidecar-cores 1", "--target-cores x", "--resume")
REFUSED = {
    "bench_queue": ("--slots 0", "--request-rate 0", "--configs qspec-3", *SERVERS),
    "bench_worst_case": (
        *("--levels 33", "--widths 1", "--widths 17", "--rounds 0", "--cases sunshine"),
        *SERVERS,
    ),
    "bench_peers": (
        *("--llama-server path", "--configs vllm", "--levels 0", "--prompts 0", "--spread 1.5"),
        *("--arrivals flood", "--samplings best", "--idle -1", "--rounds 0", "--k 0"),
        *("--pipelines --levels 3", "--pipelines --matrix"),
        *SERVERS,
    ),
    "bench_soak": (
        *("--minutes 0", "--minutes inf", "--in-flight 9 8", "--in-flight 0 8", "--templates 0"),
        "--target-cores x",
    ),
}
MESSAGES = {
    "bench_peers --pipelines --levels 3": "3 requests cannot be split into equal halves",
    "bench_peers --pipelines --matrix": "--matrix and --pipelines exclude each other",
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


@pytest.mark.parametrize("benchmark", ["bench_queue", "bench_peers"])
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
