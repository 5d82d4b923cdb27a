"""Simulated time: a heap of events, and processes that pause or wait for a signal.

A library such as SimPy would add a dependency and take several times as long for a wait with a time
limit, the most frequent event here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from typing import NamedTuple


class Signal:
    """Wakes the one process that waits for it."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] | None = None
        """Wakes the waiting process; None if no process waits."""

    def fire(self) -> None:
        """Wake the waiting process. Without one, nothing happens."""
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()


class Wait(NamedTuple):
    """What a process yields to wait for a signal."""

    signal: Signal
    seconds: float = math.inf
    """Maximum wait; the process gets False if it ends without the signal."""


Process = Generator[float | Wait, bool, None]
"""Yields a pause in seconds or a `Wait`, and gets whether the signal of a `Wait` came."""


class Clock:
    """Runs events in the order of their times, and those of one time in the order of calls."""

    def __init__(self) -> None:
        self.now = 0.0
        """Present simulated time."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def time(self) -> float:
        """Present simulated time, for what asks a clock by a call."""
        return self.now

    def call(self, delay: float, act: Callable[[], None]) -> None:
        """Run `act` after `delay` seconds."""
        heapq.heappush(self._events, (self.now + delay, self._number, act))
        self._number += 1

    def start(self, process: Process) -> None:
        """Run a process from now on."""
        self.call(0.0, lambda: self._advance(process, next))

    def run(self, until: float = math.inf) -> None:
        """Run all events, or those up to a time, which is then the present time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        if until < math.inf:
            self.now = until

    def _advance(self, process: Process, go_on: Callable[[Process], float | Wait]) -> None:
        try:
            asked = go_on(process)
        except StopIteration:
            return
        if isinstance(asked, Wait):
            self._wait(process, asked)
        else:
            self.call(asked, lambda: self._advance(process, lambda each: each.send(False)))

    def _wait(self, process: Process, asked: Wait) -> None:
        waiting = True

        def end(came: bool) -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                asked.signal.wake = None
                self._advance(process, lambda each: each.send(came))

        asked.signal.wake = lambda: self.call(0.0, lambda: end(True))
        if asked.seconds < math.inf:
            self.call(asked.seconds, lambda: end(False))
