"""Passes are settled before SGLang processes their results."""

from types import SimpleNamespace
from typing import Any

from sglang_qspec.engine import speculation
from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.scheduler import results
from sglang_qspec.engine.speculator import Speculator


def test_the_worker_settles_the_pass_of_a_result_also_after_speculation_has_ended(
    active: Speculator,
) -> None:
    settled: list[object] = []
    worker: Any = object.__new__(QSpecWorker)
    worker.settle = settled.append
    scheduler = SimpleNamespace(model_worker=worker)
    speculation.activate(active)
    results.settle(scheduler, None, "first")
    speculation.deactivate()
    results.settle(scheduler, None, "second")
    assert settled == ["first", "second"]


def test_a_worker_of_another_algorithm_is_not_asked() -> None:
    results.settle(SimpleNamespace(model_worker=object()), None, None)
