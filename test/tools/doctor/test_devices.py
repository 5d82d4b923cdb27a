"""The doctor finds a device that SGLang cannot use, and an incomplete CUDA toolkit."""

from __future__ import annotations

import os
import re
import sys
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


def write_command(path: Path, printed: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{printed}'\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        ("550.90.07", "13.0", "the NVIDIA driver is 550.90.07, .* CUDA 13.0, which needs 580 or"),
        ("470.1", "12.8", "driver is 470.1, .* CUDA 12.8, which needs 525 or newer"),
        ("580.65.06", "13.0", None),
        ("550.90.07", "12.8", None),
        ("550.90.07", None, None),
        ("no devices were found", "13.0", None),
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    cuda: str | None,
    words: str | None,
) -> None:
    write_command(tmp_path / "nvidia-smi", driver)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = devices.old_driver()
    assert found is None if words is None else re.search(words, found or "")
    if words is not None:
        finding = devices.device(Case(device="cuda"))
        assert (finding.status, finding.found) == (Status.FAILURE, found)


def test_a_toolkit_of_another_release_than_torchs_is_a_failure(tmp_path: Path) -> None:
    for name in devices.TOOLKIT[1:]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    write_command(tmp_path / devices.TOOLKIT[0], "Cuda compilation tools, release 12.4, V12.4.131")
    finding = devices.toolkit_in(tmp_path, "13.0")
    assert finding.status is Status.FAILURE
    assert "has release 12.4, but torch has CUDA 13.0" in finding.found
    for cuda in ("12.8", None):
        finding = devices.toolkit_in(tmp_path, cuda)
        assert finding.status is Status.OK
        assert finding.found.endswith("release 12.4")


def test_a_path_without_ninja_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = devices.toolkit(Case(device="cuda"))
    assert finding.status is Status.FAILURE
    assert "ninja" in finding.found
    assert f"{Path(sys.executable).parent}:$PATH" in finding.advice
    write_command(tmp_path / "ninja", "1.13")
    assert devices.missing_ninja() is None


def test_the_oldest_driver_is_that_of_the_set_up() -> None:
    script = (Path(__file__).parents[3] / "scripts" / "setup").read_text()
    assert f"driver_needed={devices.OLDEST_DRIVERS[13]}" in script


def test_the_files_of_the_toolkit_are_those_of_the_script() -> None:
    script = (Path(__file__).parents[3] / "scripts" / "toolkit").read_text()
    assert f"for file in {' '.join(devices.TOOLKIT)}; do" in script
