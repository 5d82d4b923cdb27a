"""One update may add and remove several endpoints, and all ranks of a target apply it alike."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

from sglang_qspec.engine.passes.worker import QSpecWorker
from sglang_qspec.engine.scheduler import internal_state
from sglang_qspec.engine.sidecar.endpoints import PREFIX
from sglang_qspec.values import MAX_ENDPOINTS


class Leader:
    """Rank 0's part of a worker."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ...]] = []

    def change_endpoints(self, endpoints: tuple[str, ...]) -> None:
        self.changes.append(endpoints)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address is allowed; `test_endpoints` tests the check."""
    monkeypatch.setattr(internal_state, "_validate", lambda *_: None)


def worker_of(leader: Leader | None, *endpoints: str) -> QSpecWorker:
    worker: Any = object.__new__(QSpecWorker)
    worker._leader, worker.endpoints = leader, endpoints
    return worker


def update(worker: QSpecWorker, changes: dict[str, float]) -> bool:
    """Apply an update as SGLang's `set_internal_state`."""
    controller: Any = type("Controller", (), {})()
    controller.scheduler = type("Scheduler", (), {"model_worker": worker})()
    handlers: Any = internal_state.add_handlers({"other": None}, controller)
    assert handlers.get("other", 5) is None
    assert handlers.get("qspec_unknown") is None
    named = {PREFIX + name: value for name, value in changes.items()}
    try:
        for name, value in named.items():
            handlers.get(name, "none").validate(name, value)
    except UpdateRejected:
        return False
    for name, value in named.items():
        handlers[name].apply(name, value)
    return True


@pytest.mark.parametrize("leader", [Leader(), None], ids=["rank 0", "rank 1"])
def test_an_update_changes_all_its_endpoints(leader: Leader | None) -> None:
    worker = worker_of(leader, "a", "b")
    assert update(worker, {"c": 1, "a": 0})
    assert worker.endpoints == ("b", "c")
    if leader is not None:
        assert set(leader.changes) == {("b", "c")}


@pytest.mark.parametrize("leader", [Leader(), None], ids=["rank 0", "rank 1"])
def test_an_update_with_a_wrong_part_changes_nothing(leader: Leader | None) -> None:
    worker = worker_of(leader, "a")
    assert not update(worker, {"b": 1, "nowhere": 0})
    assert not update(worker, {str(number): 1 for number in range(MAX_ENDPOINTS)})
    assert worker.endpoints == ("a",)
    assert leader is None or not leader.changes


def test_an_update_may_replace_an_endpoint_of_a_full_list() -> None:
    full = tuple(str(number) for number in range(MAX_ENDPOINTS))
    worker = worker_of(Leader(), *full)
    assert update(worker, {full[0]: 0, "more": 1})
    assert worker.endpoints == (*full[1:], "more")


def test_a_server_without_qspec_keeps_its_handlers() -> None:
    controller: Any = type("Controller", (), {})()
    controller.scheduler = type("Scheduler", (), {"model_worker": object()})()
    assert internal_state.add_handlers({}, controller) is None
