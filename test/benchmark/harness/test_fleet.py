"""Which servers run, wait and end; the servers are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.harness import fleet
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.fleet import Fleet
from benchmark.queueing.configurations import configuration

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, False, (0,), (1,))


class FakeServer:
    """Keeps what was done to it in one list of all servers."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self._done = done

    def __getattr__(self, verb: str) -> object:
        return lambda: self._done.append(f"{verb} {self.name}")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    monkeypatch.setattr(Configuration, "server", lambda self: FakeServer(self.name, done))
    monkeypatch.setattr(fleet, "wait_for_sidecar", lambda _: None)
    return done


def available(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(fleet.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))


def run(running: Fleet, *names: str) -> None:
    for name in names:
        running.run(configuration(name, SETTINGS))


def test_one_server_runs_and_the_others_wait(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, 2.0)
    with Fleet(1.0) as running:
        run(running, "none", "lookup", "lookup", "none")
    assert done == [
        *("start none", "pause none", "start lookup"),
        *("pause lookup", "resume none", "stop lookup", "stop none"),
    ]


def test_all_numbers_of_completions_are_served_by_one_server(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, 2.0)
    with Fleet(1.0) as running:
        run(running, "qspec-1", "qspec-8", "qspec-2")
    assert done == ["start qspec-1", "stop qspec-1"]


@pytest.mark.parametrize("free_bytes", [1.0, None])
def test_without_memory_the_longest_unused_server_ends_first(
    done: list[str], monkeypatch: pytest.MonkeyPatch, free_bytes: float | None
) -> None:
    available(monkeypatch, 0.5)
    with Fleet(free_bytes) as running:
        run(running, "none", "lookup")
        assert done == ["start none", "pause none", "stop none", "start lookup"]


def test_a_dropped_server_is_started_anew(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 2.0)
    with Fleet(1.0) as running:
        run(running, "none")
        running.drop(configuration("none", SETTINGS))
        run(running, "none")
    assert done == ["start none", "stop none", "start none", "stop none"]
