"""`qspec models compare` with real models: two of one tokenizer, and one of another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.tools.models import DemoModels
from test.random_llama import write_random_llama

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1, "head_dim": 64}


@pytest.fixture
def target(models: DemoModels, tmp_path: Path) -> Path:
    return write_random_llama(
        tmp_path / "target", models, num_key_value_heads=1, initializer_range=0.2, **SHAPE
    )


def run(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main(["models", "compare", *map(str, arguments)])
    captured = capfd.readouterr()
    return status, captured.out, captured.err


@pytest.mark.server
def test_a_copy_of_the_target_agrees_and_another_model_does_not(
    models: DemoModels, target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"Say {word}."}) for word in ("one", "two")))
    given = ("--target", target, "--draft", target, models.draft, "--prompts", prompts)
    # On one CPU the two take turns, and one server is enough.
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    try:
        options = ("--tokens", "12", "--in-flight", "1", "--dtype", "float32")
        status, out, err = run(capfd, *given, *options, "--device", "cpu", "--json")
    finally:
        os.sched_setaffinity(0, cpus)
    assert status == 0, err
    found = json.loads(out)
    same, other = found["candidates"]
    assert same["greedy_agreement"] == same["sampled_agreement"] == 1.0
    assert same["greedy_accepted_run"] > 5
    assert other["greedy_agreement"] < 0.5
    assert other["quantization"] == "gptq"
    assert same["step_ms"]["1"] > 0
    assert 0 < same["weight_bytes"] < other["weight_bytes"]
    assert same["memory_bytes"] > 1 << 20
    assert [row["width"] for row in found["verify_ms"]] == [1, 2, 4, 8, 16]
    assert all(row["ms"] > 0 for row in found["verify_ms"])
    assert found["plain_ms"]["1"] == found["verify_ms"][0]["ms"]
    assert {row["pipeline"] for row in same["predicted"]} == {"sequential"}
    assert other["greedy_accepted_run"] < same["greedy_accepted_run"]
    assert found["recommendation"].startswith("Recommendation: ")
    assert "loading target" in err


def test_a_draft_model_with_another_tokenizer_is_refused(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (1000, 1001))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    status, out, err = run(capfd, "--target", target, "--draft", other)
    assert (status, out) == (1, "")
    assert (
        f"--draft is '{other}', but its tokenizer differs from the target's: token id 1000" in err
    )


def test_a_folder_without_a_model_is_named(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capfd, "--target", target, "--draft", tmp_path / "none")
    assert (status, "--draft is" in err, "no such folder" in err) == (1, True, True)


def test_prompts_that_cannot_be_read_are_named(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("--target", target, "--draft", target, "--prompts", tmp_path / "none.jsonl")
    status, _, err = run(capfd, *given)
    assert status == 1
    assert "none.jsonl" in err
