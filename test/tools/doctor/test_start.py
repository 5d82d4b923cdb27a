"""The doctor says where the models go, and finds memory that does not hold them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil

from sglang_qspec.engine.placement.processes import Placement
from sglang_qspec.sidecar.memory import cpu_bytes, gib
from sglang_qspec.tools.doctor import start
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Status, Verdict, examine

MIB, TIB = 1 << 20, 1 << 40


def checkpoint(folder: Path, size: int) -> str:
    """A folder with a file of weights of `size` bytes, which take no space on the disk."""
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return str(folder)


def placed(target: str, draft: str | None) -> Verdict:
    """The verdict about a CPU server as SGLang would start it."""
    case = Case(target, draft, kind="cpu", arguments=SimpleNamespace(mem_fraction_static=0.7))
    case.placement = None if draft is None else Placement("cpu", mem_fraction=0.15)
    return examine("placement", lambda: start.placement(case)).verdict


def test_models_that_fit_are_placed(tmp_path: Path) -> None:
    target, draft = (checkpoint(tmp_path / name, MIB) for name in ("target", "draft"))
    verdict = placed(target, draft)
    assert verdict.status is Status.OK
    assert verdict.found.startswith("target on the CPU with 0.70 of the available memory")
    taken = gib(cpu_bytes(psutil.virtual_memory().total, 0.15))
    assert f"sidecar on the CPU with 0.15 of the memory (takes {taken}: 0.0 GiB" in verdict.found
    assert placed(target, None).found.endswith("no sidecar of its own")


def test_a_target_that_does_not_fit_is_a_failure(tmp_path: Path) -> None:
    verdict = placed(checkpoint(tmp_path / "target", TIB), None)
    assert verdict.status is Status.FAILURE
    assert "but it has 1024.0 GiB of weights" in verdict.found
    assert "smaller or quantized target" in verdict.advice


def test_a_draft_model_that_does_not_fit_in_its_part_is_a_failure(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", MIB)
    verdict = placed(target, checkpoint(tmp_path / "draft", TIB))
    assert verdict.status is Status.FAILURE
    assert "is too little for a draft model with 1024.0 GiB of weights" in verdict.found
