"""Starts SGLang's server with a stopwatch in its scheduler: `python -m benchmark.overhead.probe`.

SGLang spawns its processes, and each process imports this module again as `__mp_main__`. In such a
process the module sets the stopwatch, before any import of SGLang. An idle scheduler writes one
line of JSON per iteration (see `Iteration`) to the file that `QSPEC_PROBE_FILE` names.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FILE_VARIABLE = "QSPEC_PROBE_FILE"

_SCHEDULER = "sglang.srt.managers.scheduler"
_TARGET = "sglang.srt.managers.tp_worker"
_RUNNER = "sglang.srt.model_executor.model_runner"
_WORKER = "sglang_qspec.engine.passes.worker"
_LAUNCHER = "sglang_qspec.engine.passes.launcher"
_OUTCOME = "sglang_qspec.engine.passes.outcome"
_INPUT = "sglang_qspec.engine.passes.launch.verify_input"
_SPECULATOR = "sglang_qspec.engine.speculator"
_LIFECYCLE = "sglang_qspec.engine.scheduler.lifecycle"

CALLS = {
    (_TARGET, "TpModelWorker.forward_batch_generation"): "worker",
    (_WORKER, "QSpecWorker.forward_batch_generation"): "worker",
    (_RUNNER, "ModelRunner.forward"): "model",
}
"""Functions to time: the target's pass as the scheduler calls it, and its model forward pass."""

HOOKS = {
    (_LIFECYCLE, "polled"): "poll",
    (_LIFECYCLE, "enqueued"): "enqueue",
    (_LIFECYCLE, "aborted"): "end",
    (_LIFECYCLE, "finished"): "end",
}
"""QSPEC's work in the scheduler outside the worker."""

PARTS = {
    (_SPECULATOR, "Speculator.poll"): "poll",
    (_SPECULATOR, "Speculator.propose"): "propose",
    (_SPECULATOR, "Speculator.commit"): "record",
    (_SPECULATOR, "Speculator.count"): "record",
    (_SPECULATOR, "Speculator.wait_for_steps"): "wait",
    ("sglang_qspec.policy.width", "WidthPolicy.choose"): "width",
    ("sglang_qspec.policy.row_budget", "RowBudget.choose"): "width",
    (_WORKER, "verify_input_of"): "layout",
    (_INPUT, "TreeVerifyInput.slots"): "slots",
    (_LAUNCHER, "Launcher._finished"): "finish",
    (_LAUNCHER, "sample_and_accept"): "sample",
    (_INPUT, "TreeVerifyInput.move_accepted"): "move",
    (_OUTCOME, "ComingOutcome.read"): "nodes",
    ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch.init_new"): "batch",
    (_RUNNER, "ModelRunner.sample"): "sample",
}
"""Parts of the worker's call besides the model, without overlap."""


def _now_ms() -> float:
    return time.perf_counter() * 1e3


class Stopwatch:
    """Records the times of each scheduler iteration, in milliseconds."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._began: float | None = None
        self._row: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._in_worker = False

    def turn(self, batch: Any) -> None:
        """Begin an iteration, and end the previous one."""
        now = _now_ms()
        self._close(now)
        self._began = now
        self._row = {
            "decode": batch.forward_mode.is_decode(),
            "running": len(batch.reqs),
            "width": 1,
            "worker": 0.0,
            "model": 0.0,
            "hooks": {},
            "parts": {},
        }

    def idle(self) -> None:
        """Write the iterations, except the last: its period has no end, since none follows."""
        self._close(None)
        if self._rows:
            with open(self._path, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in self._rows)
            self._rows.clear()

    def _close(self, now: float | None) -> None:
        if self._began is not None and now is not None:
            self._row["period"] = now - self._began
            self._rows.append(self._row)
        self._began = None

    def call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with a stopwatch on its outermost call."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            is_worker = name == "worker"
            if is_worker and self._in_worker:
                return function(*args, **kwargs)
            self._in_worker |= is_worker
            began = _now_ms()
            try:
                result = function(*args, **kwargs)
            finally:
                self._in_worker &= not is_worker
            if self._began is not None:
                self._row[name] += _now_ms() - began
                if is_worker:
                    self._row["width"] = getattr(result, "speculative_num_draft_tokens", None) or 1
            return result

        return timed

    def part(self, kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with a stopwatch: a part counts in the worker's call, a hook outside it."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._began is None or (kind == "parts") != self._in_worker:
                return function(*args, **kwargs)
            began = _now_ms()
            result = function(*args, **kwargs)
            times = self._row[kind]
            times[name] = times.get(name, 0.0) + _now_ms() - began
            return result

        return timed

    def wrap(self, module: ModuleType) -> None:
        """Set the stopwatch on the functions of `module`."""
        if module.__name__ == _SCHEDULER:
            self._wrap_scheduler(module.Scheduler)
        for (home, path), name in CALLS.items():
            if home == module.__name__:
                _replace(module, path, functools.partial(self.call, name))
        for kind, table in (("hooks", HOOKS), ("parts", PARTS)):
            for (home, path), name in table.items():
                if home == module.__name__:
                    _replace(module, path, functools.partial(self.part, kind, name))

    def _wrap_scheduler(self, scheduler: Any) -> None:
        run_batch, on_idle = scheduler.run_batch, scheduler.on_idle

        @functools.wraps(run_batch)
        def timed_run_batch(itself: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.turn(batch)
            return run_batch(itself, batch, *args, **kwargs)

        @functools.wraps(on_idle)
        def watched_on_idle(itself: Any) -> Any:
            self.idle()
            return on_idle(itself)

        scheduler.run_batch, scheduler.on_idle = timed_run_batch, watched_on_idle


def _replace(module: ModuleType, path: str, timed: Callable[[Any], Any]) -> None:
    """Replace the attribute x by `timed(x)`. Raises AttributeError if there is no x."""
    owner: Any = module
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    found = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    if isinstance(found, classmethod):
        setattr(owner, name, classmethod(timed(found.__func__)))
    else:
        setattr(owner, name, timed(found))


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules as usual, and wraps the timed ones after their import."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._names = {home for home, _ in (*CALLS, *HOOKS, *PARTS)} | {_SCHEDULER}
        self._loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.discard(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self._loaders[name] = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        self._stopwatch.wrap(module)


if __name__ == "__mp_main__":
    sys.meta_path.insert(0, AfterImport(Stopwatch(os.environ[FILE_VARIABLE])))

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
