"""The check runs its parts in processes with time limits, and sums up their results."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmark.gpu_check import check as checking
from benchmark.gpu_check.check import check, environment, failures, skips, summary
from benchmark.gpu_check.findings import Findings, Options
from benchmark.gpu_check.parts import PARTS, Part
from benchmark.harness import standin
from test.benchmark.gpu_check import fakes

CPU = Options("cpu", emulated=True)
GPU = Options("cuda", emulated=False)


def part(name: str, seconds: int = 60, not_emulated: str = "") -> Part:
    return Part(name, fakes.__name__, seconds, "a fake", not_emulated)


def test_a_failure_is_named_and_does_not_end_the_others(tmp_path: Path) -> None:
    found = check([], CPU, 300.0, tmp_path, [part("wrong"), part("crashing"), part("fine")])
    assert failures(found) == {
        "wrong.sum": "AssertionError: two is not three",
        "wrong": "RuntimeError: the rest broke",
        "crashing": "ended with 7: ",
    }
    assert skips(found) == {"wrong.gpu": "there is none"}
    assert found["wrong"].passed == ["after"]
    assert found["crashing"].passed == ["before"]
    assert found["fine"].passed == ["one"]
    assert found["fine"].figures == {"device": "cpu"}
    assert summary(found) == {
        "failed": ["wrong.sum", "wrong", "crashing"],
        "eager_passes": 2,
        "identical": False,
        "skipped": ["wrong.gpu"],
    }
    # Without results the last line claims nothing.
    nothing = summary({"one": Findings()})
    assert (nothing["identical"], nothing["eager_passes"]) == (None, None)


def patient_popen(sign: Path) -> type[subprocess.Popen[bytes]]:
    """Processes of which each time limit begins once `sign` has content, or they have ended.

    So the start of a part, which is slow on a busy machine, does not count.
    """

    class Patient(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            deadline = time.monotonic() + 120
            while self.poll() is None and not (sign.exists() and sign.read_text()):
                assert time.monotonic() < deadline, "the part did not start"
                time.sleep(0.05)
            return super().wait(timeout)

    return Patient


def test_a_part_over_its_limit_ends_with_its_processes_and_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    monkeypatch.setenv(fakes.CHILD_FILE, str(child))
    monkeypatch.setattr(checking, "STOP_SECONDS", 5.0)
    patient = SimpleNamespace(**{**vars(subprocess), "Popen": patient_popen(child)})
    monkeypatch.setattr(checking, "subprocess", patient)
    began = time.monotonic()
    found = check([], CPU, 300.0, tmp_path, [part("hanging", seconds=1)])
    assert time.monotonic() - began < 300  # the part sleeps for 600 s
    assert failures(found)["hanging"].startswith("the time limit of 1 s is over")
    assert found["hanging"].passed == ["before"]
    number = int(child.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == "zombie"


def test_no_part_starts_after_the_total_time(tmp_path: Path) -> None:
    found = check([], CPU, 1.0, tmp_path, [part("fine"), part("wrong")])
    assert failures(found) == dict.fromkeys(("fine", "wrong"), "the total time is over")


def test_the_time_of_a_part_that_does_not_count_is_not_taken_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes 10 of the 12 seconds."""
    now, limits = 0.0, list[float]()

    def run(_part: Part, _options: Options, limit: float, _folder: Path) -> Findings:
        nonlocal now
        now += 10.0
        limits.append(limit)
        return Findings(seconds=10.0)

    monkeypatch.setattr(checking, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(checking, "run", run)
    parts = [part("first")._replace(counts=False), part("second"), part("third")]
    found = check([], CPU, 12.0, tmp_path, parts)
    assert limits == [60, 12.0]
    assert failures(found) == {"third": "the total time is over"}


def test_an_emulated_check_leaves_out_parts_with_servers_unless_they_are_named(
    tmp_path: Path,
) -> None:
    parts = [part("wrong"), part("fine", not_emulated="it starts servers")]
    (fine,) = check(["fine"], CPU, 60.0, tmp_path, parts).values()
    assert fine.passed == ["one"]
    found = check([], CPU, 60.0, tmp_path, parts[1:])
    assert found["fine"] == Findings(skipped={"": "it starts servers"})


def test_every_part_exists_and_all_fit_a_first_hour() -> None:
    import importlib

    for each in PARTS:
        assert callable(getattr(importlib.import_module(each.module), each.name))
    assert sum(each.seconds for each in PARTS if each.counts) < 3600


def test_a_gpu_whose_sgl_kernel_loads_gets_no_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(standin, "import_error", lambda: None)
    assert "PYTHONPATH" not in environment(GPU)
    monkeypatch.setattr(standin, "import_error", lambda: "ImportError: undefined symbol")
    assert environment(GPU)["PYTHONPATH"] == str(standin.FOLDER)
    assert "PYTHONPATH" not in environment(CPU)
