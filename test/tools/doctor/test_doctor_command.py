"""`qspec doctor` as a user calls it, on the demo models."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.tools.doctor.checks import CHECKS
from sglang_qspec.tools.models import DemoModels
from test.random_llama import write_random_llama

DOCTOR = [sys.executable, "-m", "sglang_qspec", "doctor"]
on_cpu = pytest.mark.skipif(
    os.environ.get("SGLANG_USE_CPU_ENGINE") != "1", reason="describes a CPU server"
)


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor; whatever is wrong, it prints no traceback."""
    done = subprocess.run(
        [*DOCTOR, *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", **environment},
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def examined(*options: str, **environment: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit status, the JSON object, and its checks by name."""
    done = run("--json", *options, **environment)
    content: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, content, {each["name"]: each for each in content["checks"]}


def failed(checks: dict[str, Any]) -> list[str]:
    return [name for name, each in checks.items() if each["status"] == "failure"]


def pair(models: DemoModels) -> list[str]:
    return ["--model", str(models.target), "--draft-model", str(models.draft)]


@on_cpu
def test_the_demo_models_are_usable_and_the_command_starts_their_server(
    models: DemoModels,
) -> None:
    status, content, checks = examined(*pair(models), "--port", "30431")
    assert failed(checks) == []
    assert (status, content["version"], content["usable"]) == (0, 1, True)
    left_out = {"endpoint", "toolkit", "measure", "head", "draft model's head"}
    assert list(checks) == [check.name for check in CHECKS if check.name not in left_out]
    assert content["warnings"] == sum(each["status"] == "warning" for each in checks.values())
    assert "sidecar on the CPU with 0.15 of the memory" in checks["placement"]["found"]
    words = shlex.split(content["command"])
    assert words[:4] == ["SGLANG_USE_CPU_ENGINE=1", "python", "-m", "sglang.launch_server"]
    assert words[4:] == [
        *("--model-path", str(models.target), "--speculative-algorithm", "QSPEC"),
        *("--speculative-draft-model-path", str(models.draft), "--port", "30431"),
    ]


@on_cpu
def test_settings_that_the_start_refuses_are_refused_with_its_words(models: DemoModels) -> None:
    refused = {"SGLANG_RUST_SERVER": "1"}
    status, content, checks = examined("--model", str(models.target), **refused)
    assert (status, content["usable"], content["command"]) == (1, False, None)
    assert failed(checks) == ["start"]
    assert "SGLANG_RUST_SERVER is True, but QSPEC supports only false" in checks["start"]["found"]


@on_cpu
def test_a_server_that_would_not_load_the_plugin_is_found(models: DemoModels) -> None:
    status, _, checks = examined(*pair(models), SGLANG_PLUGINS="other")
    assert status == 1
    assert failed(checks) == ["hooks"]
    assert "SGLANG_PLUGINS is 'other'" in checks["hooks"]["found"]
    assert "target" not in checks


def test_the_text_names_what_is_wrong_and_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        # The device fails, so the checks end before SGLang is imported.
        done = run("--port", port, "--device", "cuda:99", SGLANG_QSPEC_MODE="fast")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok       python") for line in lines)
    assert any(line.startswith(f"failure  port           127.0.0.1:{port}") for line in lines)
    assert any(line.strip().startswith("→ Give another port") for line in lines)
    assert "SGLANG_QSPEC_MODE is 'fast'" in done.stdout
    assert "Not usable: 3 failures." in done.stdout
    assert done.stderr == ""


@on_cpu
def test_a_measurement_says_what_to_expect(models: DemoModels, tmp_path: Path) -> None:
    """A small random model drafts for itself, so both agree on nearly all tokens."""
    folder = str(write_random_llama(tmp_path, models, hidden_size=64, intermediate_size=128))
    options = ["--model", folder, "--draft-model", folder, "--measure"]
    status, content, checks = examined(*options)
    assert (status, failed(checks)) == (0, [])
    measured = content["measured"]
    assert [each["rows"] for each in measured["verify"]] == [1, 2, 4, 8, 16, 32, 64]
    assert all(each["seconds"] > 0 for each in measured["draft"])
    assert measured["agreement"] > 0.8
    assert [each["in_flight"] for each in measured["predicted"]] == [1, 2, 4, 8, 16]
    assert "A pass of the target over 1, 4, 16 rows takes" in content["expectation"]
    pays = any(each["speedup"] >= 1.05 for each in measured["predicted"])
    assert checks["measure"]["status"] == ("ok" if pays else "warning")
    assert ("--speculative-draft-model-path" in content["command"]) == pays


def test_a_measurement_needs_both_models() -> None:
    done = run("--measure", "--model", "target")
    assert done.returncode == 1
    assert done.stderr == "qspec: --measure needs --model and --draft-model\n"
