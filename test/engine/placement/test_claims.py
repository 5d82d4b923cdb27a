"""A GPU belongs to the sidecar of one server at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_qspec.engine.placement import claims
from sglang_qspec.engine.placement.claims import Claims
from sglang_qspec.engine.placement.devices import Gpu
from sglang_qspec.sidecar.memory import GIB

GPU = Gpu(0, "GPU-0", 80 * GIB, 0)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_claimed_gpu_is_refused_to_other_processes_until_the_claim_ends() -> None:
    ours, others = Claims(), Claims()  # two open files exclude each other as two processes do
    assert ours.claim(GPU)
    assert ours.claim(GPU)  # its own claim
    assert not others.claim(GPU)
    assert others.claim(Gpu(0, "GPU-other", 80 * GIB, 0))
    ours.release()
    assert others.claim(GPU)
    others.release()


def test_a_claim_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.geteuid()
    path = claims._directory()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    os.rename(path, path.replace(f"_{real}", f"_{real + 1}"))
    with pytest.raises(PermissionError, match="belongs to another user"):
        claims._directory()
    ours = Claims()
    assert ours.claim(GPU)  # without a lock, the measured memory alone decides
    assert not ours._locks
