"""Simulated time: pauses, signals and time limits."""

from __future__ import annotations

from sglang_qspec.tools.plan.clock import Clock, Process, Signal, Wait


def test_processes_pause_in_the_order_of_time() -> None:
    clock, seen = Clock(), []

    def pausing(name: str, seconds: float) -> Process:
        for _ in range(2):
            yield seconds
            seen.append((name, clock.now))

    clock.start(pausing("slow", 3.0))
    clock.start(pausing("fast", 2.0))
    clock.run()
    assert seen == [("fast", 2.0), ("slow", 3.0), ("fast", 4.0), ("slow", 6.0)]


def test_a_signal_ends_a_wait_before_its_limit_and_only_once() -> None:
    clock, signal, seen = Clock(), Signal(), []

    def waiting() -> Process:
        for _ in range(2):
            came = yield Wait(signal, 5.0)
            seen.append((came, clock.now))

    clock.start(waiting())
    clock.call(1.0, signal.fire)
    clock.call(1.0, signal.fire)  # nothing waits for this one any more
    clock.run()
    assert seen == [(True, 1.0), (False, 6.0)]


def test_a_wait_without_a_limit_ends_with_the_simulation() -> None:
    clock, seen = Clock(), []

    def waiting() -> Process:
        yield Wait(Signal())
        seen.append("woken")

    clock.start(waiting())
    clock.run()
    assert not seen
