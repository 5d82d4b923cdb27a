"""The working memory of a sidecar on a GPU is measured, and an excess names the settings."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.loading import DraftModelOptions
from sglang_qspec.sidecar.memory import CONTEXT_BYTES, GIB, RUNTIME_BYTES
from sglang_qspec.sidecar.working_memory import TOLERANCE, report, working_bytes

FIXED = 7 * GIB


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that NVML reports on a GPU of 80 GiB, where torch has 9 GiB of this one."""
    running: list[Any] = []
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 9 * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (GIB, 80 * GIB))
    monkeypatch.setattr("torch.cuda._get_pynvml_handler", lambda _: "gpu")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: running)
    return running


def process(pid: int, size: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=size)


def test_the_process_counts_as_nvml_says_with_what_torch_does_not_know(
    processes: list[Any],
) -> None:
    processes += [process(1, 40 * GIB), process(os.getpid(), 11 * GIB)]
    assert working_bytes(FIXED) == 4 * GIB


@pytest.mark.parametrize("known", [[], [process(1, 40 * GIB)], [process(os.getpid(), None)]])
def test_the_context_is_estimated_where_nvml_does_not_know_the_process(
    processes: list[Any], known: list[Any]
) -> None:
    processes += known
    assert working_bytes(FIXED) == 2 * GIB + CONTEXT_BYTES


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "error", [pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), ValueError("a MIG instance")]
)
def test_an_nvml_that_does_not_answer_is_no_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: object) -> Any:
        raise error

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", fail)
    assert working_bytes(FIXED) == 2 * GIB + CONTEXT_BYTES


@pytest.mark.usefixtures("processes")
def test_an_excess_is_a_warning_with_the_settings_and_the_share(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report(RUNTIME_BYTES + 4 * GIB, 0.15)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert text.startswith("took 6.5 GiB of the GPU besides weights and KV, but the estimate is")
    assert "takes 0.20 of the GPU instead of 0.15" in text
    assert "--mem-fraction-static by 0.05" in text
    assert "--speculative-qspec-mem-fraction" in text


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("taken", "fraction"),
    [(RUNTIME_BYTES + TOLERANCE, 0.15), (RUNTIME_BYTES // 2, 0.15), (9 * RUNTIME_BYTES, None)],
    ids=["within tolerance", "less", "the whole GPU"],
)
def test_what_was_taken_is_logged_beside_the_estimate_without_a_warning(
    caplog: pytest.LogCaptureFixture, taken: int, fraction: float | None
) -> None:
    caplog.set_level(logging.INFO, "sglang_qspec")
    report(taken, fraction)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "the estimate is 2.5 GiB" in record.getMessage()


@pytest.mark.parametrize(("device", "reports"), [("cuda:0", 1), ("cpu", 0)])
def test_a_model_reports_what_it_took_since_the_kv_on_a_gpu_alone(
    processes: list[Any], caplog: pytest.LogCaptureFixture, device: str, reports: int
) -> None:
    processes.append(process(os.getpid(), FIXED + 5 * GIB))
    model: Any = object.__new__(DraftModel)
    model._device, model._fixed_bytes = torch.device(device), FIXED
    model._options = DraftModelOptions("m", mem_fraction=0.15)
    model.report_memory()
    assert [record.getMessage()[:12] for record in caplog.records] == ["took 5.0 GiB"] * reports
