"""The doctor says where the models go, and finds memory that does not hold them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil

from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.sidecar.memory import cpu_bytes, gib
from sglang_qspec.tools.doctor import start
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, Status, examine

MIB, TIB = 1 << 20, 1 << 40


def checkpoint(folder: Path, size: int) -> str:
    """A folder with a file of weights of `size` bytes, which take no space on the disk."""
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return str(folder)


def placed(target: str, draft: str | None) -> Finding:
    """The finding about a CPU server as SGLang would start it."""
    case = Case(target, draft, kind="cpu", arguments=SimpleNamespace(mem_fraction_static=0.7))
    case.placement = None if draft is None else Placement("cpu", mem_fraction=0.15)
    return examine("placement", lambda: start.placement(case))


def test_models_that_fit_are_placed(tmp_path: Path) -> None:
    target, draft = (checkpoint(tmp_path / name, MIB) for name in ("target", "draft"))
    finding = placed(target, draft)
    assert finding.status is Status.OK
    assert finding.found.startswith("target on the CPU with 0.70 of the available memory")
    taken = gib(cpu_bytes(psutil.virtual_memory().total, 0.15))
    assert f"sidecar on the CPU with 0.15 of the memory (takes {taken}: 0.0 GiB" in finding.found
    assert placed(target, None).found.endswith("no sidecar of its own")


def test_a_target_that_does_not_fit_is_a_failure(tmp_path: Path) -> None:
    finding = placed(checkpoint(tmp_path / "target", TIB), None)
    assert finding.status is Status.FAILURE
    assert "but it has 1024.0 GiB of weights" in finding.found
    assert "smaller or quantized target" in finding.advice


def test_a_draft_model_that_does_not_fit_in_its_part_is_a_failure(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", MIB)
    finding = placed(target, checkpoint(tmp_path / "draft", TIB))
    assert finding.status is Status.FAILURE
    assert "is too little for a draft model with 1024.0 GiB of weights" in finding.found
