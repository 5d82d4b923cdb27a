"""Claims of CPU cores: distinct in each process, and free again after its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_qspec.tools.batch.cluster.cores import Cores

HOLD = "import sys; from sglang_qspec.tools.batch.cluster.cores import Cores; claim = Cores(1); "
HOLD += "print(*claim.numbers, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {9001, 9002, 9003})


def test_processes_claim_different_cores_as_long_as_some_are_free() -> None:
    first, second = Cores(2), Cores(2)
    assert first.numbers == {9001, 9002}
    assert second.numbers == {9003}
    assert not Cores(1).numbers
    assert not Cores(0).numbers


def test_a_core_is_free_again_when_its_process_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        held = int(process.stdout.readline())
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {held})
        assert not Cores(1).numbers
        process.kill()
        process.wait()
    assert Cores(1).numbers == {held}
