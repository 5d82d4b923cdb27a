"""The stopwatch of `bench_overhead` on stand-ins, and the figures of its records."""

import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmark.overhead import probe
from benchmark.overhead.iterations import added, plain_decode, read


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
    assert 2.0 <= row["model"] < 20_000  # milliseconds
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


def line(**changes: Any) -> str:
    """A decode iteration of 20 ms: 12 ms in the model, 5 around it, 1 in a hook, 2 elsewhere."""
    row: dict[str, Any] = {
        "decode": True,
        "running": 4,
        "width": 3,
        "period": 20.0,
        "worker": 17.0,
        "model": 12.0,
        "hooks": {"poll": 1.0},
        "parts": {"propose": 3.0, "sample": 0.5},
    }
    return json.dumps({**row, **changes})


def test_an_iteration_that_decodes_is_split_into_model_plugin_and_scheduler_time() -> None:
    (iteration, other) = read([line(), line(decode=False), line(running=2)])
    assert other.running == 2
    assert iteration.around_model == pytest.approx(5.0)
    assert iteration.ours == pytest.approx(6.0)
    assert iteration.outside_model == pytest.approx(8.0)


def test_added_time_is_the_plugins_time_minus_a_plain_steps_time_around_the_model() -> None:
    plain = plain_decode(read([line(worker=13.5, period=15.0, hooks={}, parts={})] * 3))
    assert plain.step_ms == pytest.approx(13.5)
    found = added(read([line(), line(), line(hooks={"poll": 31.0})]), plain)
    assert found.added_ms_median == pytest.approx(6.0 - 1.5)
    assert found.added_share == pytest.approx(4.5 / 13.5)
    assert found.added_ms_p99 == pytest.approx(36.0 - 1.5)
    assert found.whole_ms_median == pytest.approx(8.0 - 3.0)
    assert (found.iterations, found.width) == (3, 3.0)
    assert list(found.parts_ms.items())[:2] == [("hook: poll", 11.0), ("propose", 3.0)]
    assert sum(found.parts_ms.values()) == pytest.approx((6 + 6 + 36) / 3)
    with pytest.raises(ValueError, match="no iteration"):
        plain_decode([])
