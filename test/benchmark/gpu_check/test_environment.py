"""The environment part reads a machine's GPU and CUDA toolkit from made-up commands."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from benchmark.gpu_check import memory
from benchmark.gpu_check.environment import environment
from benchmark.gpu_check.findings import Options, Steps
from benchmark.harness import standin

GPU = "0, NVIDIA T, 580.1, 80 MiB, 9.0"


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU that torch does not see, and a complete toolkit."""
    used = tmp_path / "used"
    used.write_text("300\n20\n")
    answer = f'case "$1" in *memory.used*) cat {used};; *) echo "{GPU}";; esac'
    program(tmp_path / "bin" / "nvidia-smi", answer)
    toolkit = tmp_path / "cuda"
    program(
        toolkit / "bin" / "nvcc",
        "echo 'Cuda compilation tools, release 13.0, V1'; echo 'Build 13.0'",
    )
    program(tmp_path / "bin" / "ninja", "")
    program(toolkit / "include" / "cuda_runtime.h", "")
    program(toolkit / "lib64" / "libcudart.so", "")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    return tmp_path


@pytest.mark.parametrize("complete", [True, False])
def test_the_facts_and_what_is_missing_are_recorded(
    machine: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(standin, "import_error", lambda: "ImportError: undefined symbol")
    if not complete:
        (machine / "cuda" / "bin" / "nvcc").unlink()
    steps = Steps()
    environment(Options("cuda", emulated=False), steps)
    found = steps.found
    assert found.figures["gpus"] == [GPU]
    assert found.failed.pop("gpu") == "AssertionError: torch finds no GPU that it can use"
    assert "undefined symbol" in found.skipped["sgl_kernel"]
    if complete:
        assert (found.passed, found.failed) == (["toolkit"], {})
        assert found.figures["nvcc"] == "Build 13.0"
        assert found.figures["cuda_home"] == str(machine / "cuda")
    else:
        assert "bin/nvcc" in found.failed["toolkit"]


def test_a_machine_without_ninja_cannot_compile(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    steps = Steps()
    environment(Options("cuda", emulated=False), steps)
    assert "ninja" in steps.found.failed["toolkit"]


@pytest.mark.usefixtures("machine")
def test_the_memory_in_use_is_the_sum_over_all_gpus() -> None:
    assert memory.used_mib() == 320


def test_the_peak_is_the_largest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, over = [320, 750, 150, 140], threading.Event()

    def used() -> int:
        if len(samples) == 1:
            over.set()
            return samples[0]
        return samples.pop(0)

    monkeypatch.setattr(memory, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(memory, "used_mib", used)
    with memory.Peak() as peak:
        assert over.wait(120)
    assert peak.mib == 750


def test_without_nvidia_smi_there_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with memory.Peak() as peak:
        pass
    assert peak.mib is None
