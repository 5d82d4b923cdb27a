"""The doctor finds a device that SGLang cannot use, and an incomplete CUDA toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_qspec import config
from sglang_qspec.tools.doctor import devices
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Status

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a CPU server; its changes end with the test."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")


def test_a_cpu_server_runs_on_the_cpu() -> None:
    case = Case()
    finding = devices.device(case)
    assert case.kind == "cpu"
    assert finding.found.startswith("the CPU (")
    assert "not set" not in finding.found


def test_a_cpu_server_without_its_variable_is_a_warning_and_the_command_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    case = Case("target", device="cpu")
    finding = devices.device(case)
    assert finding.status is Status.WARNING
    assert "SGLANG_USE_CPU_ENGINE is not set" in finding.found
    assert config.cpu_engine()  # later checks import SGLang
    assert (case.command() or "").startswith("SGLANG_USE_CPU_ENGINE=1 ")


@without_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_torch_does_not_find_is_a_failure(device: str) -> None:
    case = Case(device=device)
    finding = devices.device(case)
    assert finding.status is Status.FAILURE
    assert "finds no GPU that it can use" in finding.found
    assert "--device cpu" in finding.advice
    assert case.kind is None


def test_a_toolkit_without_one_of_its_files_is_a_failure(tmp_path: Path) -> None:
    for name in devices.TOOLKIT:
        finding = devices.toolkit_in(tmp_path)
        assert finding.status is Status.FAILURE
        assert f"has no {name}" in finding.found
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert devices.toolkit_in(tmp_path).status is Status.OK


def test_the_files_of_the_toolkit_are_those_of_the_script() -> None:
    script = (Path(__file__).parents[3] / "scripts" / "toolkit").read_text()
    assert f"for file in {' '.join(devices.TOOLKIT)}; do" in script
