"""The stopwatch on stand-ins for a scheduler, a worker and a model."""

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmark.overhead import probe


class Batch:
    """A decode batch of two requests."""

    reqs = ("a", "b")
    forward_mode = SimpleNamespace(is_decode=lambda: True)


class Worker:
    """A worker that calls another worker, as QSPEC's worker calls the target's worker."""

    def __init__(self, stopwatch: probe.Stopwatch) -> None:
        self.model = stopwatch.call("model", lambda: time.sleep(0.002))
        self.target = stopwatch.call("worker", self.model)
        self.propose = stopwatch.part("parts", "propose", lambda: time.sleep(0.002))
        self.hook = stopwatch.part("hooks", "poll", lambda: time.sleep(0.001))
        self.forward = stopwatch.call("worker", self._forward)

    def _forward(self) -> Any:
        self.propose()
        self.hook()
        self.target()
        return SimpleNamespace(speculative_num_draft_tokens=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_iteration_counts_its_worker_once_with_its_parts_inside_and_hooks_outside(
    path: Path,
) -> None:
    stopwatch = probe.Stopwatch(str(path))
    worker = Worker(stopwatch)
    stopwatch.turn(Batch())
    worker.hook()
    worker.propose()
    worker.forward()
    stopwatch.turn(Batch())
    # An iteration that idle time follows has no end, and is not written.
    stopwatch.idle()
    stopwatch.turn(Batch())
    stopwatch.idle()
    (row,) = rows(path)
    assert row["worker"] + row["hooks"]["poll"] < row["period"]
    assert row["model"] + row["parts"]["propose"] < row["worker"]
    assert (row["running"], row["width"], row["decode"]) == (2, 3, True)


def test_a_module_is_timed_as_soon_as_it_is_imported(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timed_module.py").write_text(
        "class Runner:\n    @classmethod\n    def forward(cls): return cls.__name__\n"
    )
    monkeypatch.setattr(probe, "CALLS", {("timed_module", "Runner.forward"): "model"})
    monkeypatch.syspath_prepend(tmp_path)
    stopwatch = probe.Stopwatch(str(path))
    monkeypatch.setattr(sys, "meta_path", [probe.AfterImport(stopwatch), *sys.meta_path])
    module: ModuleType = __import__("timed_module")
    stopwatch.turn(Batch())
    assert module.Runner.forward() == "Runner"
    stopwatch.turn(Batch())
    stopwatch.idle()
    assert rows(path)[0]["model"] > 0
    sys.modules.pop("timed_module")


def test_every_timed_function_exists() -> None:
    # This import comes first, because SGLang cannot import its kernels on every CPU.
    import sglang_qspec  # noqa: F401

    for home, path in (*probe.CALLS, *probe.HOOKS, *probe.PARTS):
        owner: Any = importlib.import_module(home)
        for name in path.split("."):
            owner = getattr(owner, name)
        assert callable(owner)
