"""The fleet runs, pauses and ends the right servers; the servers are stand-ins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.harness import fleet
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.fleet import Fleet
from benchmark.harness.server import ServerError
from benchmark.queueing.configurations import configuration

SETTINGS = Settings(Path("target"), Path("draft"), "float32", 2, 2048, False, (0,), (1,))
TARGET, SIDECAR = 3, 2
"""Memory of a target and of a sidecar, in bytes."""


class Machine:
    """Stand-in servers that record each action, and the memory that they leave free."""

    def __init__(self, memory: float) -> None:
        self.done: list[str] = []
        self.available = memory
        self.refused: list[str] = []
        """Names of servers that fail to start while others wait."""
        self.running = 0

    def server(self, configuration: Configuration) -> FakeServer:
        return FakeServer(self, configuration)


class FakeServer:
    def __init__(self, machine: Machine, configuration: Configuration) -> None:
        self.name = configuration.name
        self.private_bytes = TARGET + SIDECAR * configuration.has_sidecar
        self._machine = machine

    def __enter__(self) -> FakeServer:
        try:
            self.start()
        except ServerError:
            self.stop()
            raise
        return self

    def start(self) -> None:
        self._machine.done.append(f"start {self.name}")
        if self.name in self._machine.refused and self._machine.running:
            raise ServerError("out of memory")
        self._machine.running += 1
        self._machine.available -= self.private_bytes

    def stop(self) -> None:
        self._machine.done.append(f"stop {self.name}")
        if f"start {self.name}" in self._machine.done and self.name not in self._machine.refused:
            self._machine.running -= 1
            self._machine.available += self.private_bytes

    def pause(self) -> None:
        self._machine.done.append(f"pause {self.name}")

    def resume(self) -> None:
        self._machine.done.append(f"resume {self.name}")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(100.0)
    monkeypatch.setattr(Configuration, "server", lambda self: machine.server(self))
    monkeypatch.setattr(fleet, "wait_for_sidecar", lambda _: None)
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=machine.available))
    monkeypatch.setattr(fleet, "psutil", memory)
    monkeypatch.setattr(fleet, "SPARE_BYTES", 1.0)
    return machine


def run(running: Fleet, *names: str) -> None:
    for name in names:
        running.run(configuration(name, SETTINGS))


def test_one_server_runs_and_the_others_wait(machine: Machine) -> None:
    with Fleet(True) as running:
        run(running, "none", "lookup", "lookup", "none")
        running.drop(configuration("none", SETTINGS))
        run(running, "none")
    assert machine.done == [
        *("start none", "pause none", "start lookup", "pause lookup", "resume none"),
        *("stop none", "start none", "stop lookup", "stop none"),
    ]


def test_a_waiting_server_runs_again_after_the_end_of_the_running_one(machine: Machine) -> None:
    with Fleet(True) as running:
        run(running, "none", "lookup")
        running.drop(configuration("lookup", SETTINGS))
        run(running, "none", "none")
        assert machine.done[3:] == ["stop lookup", "resume none"]


def test_a_server_that_lacks_memory_ends_the_longest_unused_server_first(machine: Machine) -> None:
    machine.available = 3 * TARGET + 0.5
    with Fleet(True) as running:
        run(running, "none", "lookup", "ngram")
        assert machine.done == [
            *("start none", "pause none", "start lookup", "pause lookup"),
            *("stop none", "start ngram"),
        ]


def test_a_sidecar_that_was_never_measured_counts_as_large_as_its_target(machine: Machine) -> None:
    machine.available = 3 * TARGET
    with Fleet(True) as running:
        run(running, "none", "qspec-8")
        assert machine.done == ["start none", "pause none", "stop none", "start qspec-8"]
        # The fleet has measured the sidecar, so it knows that both servers fit.
        run(running, "none", "qspec-8")
        assert machine.done[4:] == ["pause qspec-8", "start none", "pause none", "resume qspec-8"]


def test_a_server_that_fails_to_start_beside_others_is_started_alone(machine: Machine) -> None:
    machine.refused = ["lookup"]
    with Fleet(True) as running:
        run(running, "none", "lookup")
        assert machine.done[2:] == ["start lookup", "stop lookup", "stop none", "start lookup"]


def test_on_a_gpu_no_server_waits(machine: Machine) -> None:
    with Fleet(False) as running:
        run(running, "none", "lookup")
        assert machine.done == ["start none", "pause none", "stop none", "start lookup"]
