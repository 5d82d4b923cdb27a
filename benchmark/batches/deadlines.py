"""Simulates batches with deadlines on servers that are nearly full."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_qspec.policy.deadlines import Due, choose

SPEED = 1000.0
"""Output tokens per second of the simulated servers."""
HOUR = 3600.0
LOAD = 0.95
"""Share of the servers' tokens that the batches need."""
STEP_S = 20.0
"""Maximum time for which one batch is served, in seconds."""


@dataclass
class Simulated:
    """A batch of the simulation."""

    arrives: float
    window: float
    left: float
    """Output tokens of the lines without an answer."""
    ends: float = 0.0

    @property
    def deadline(self) -> float:
        """Time at which it must be done, in seconds."""
        return self.arrives + self.window

    @property
    def is_late(self) -> bool:
        """Whether it missed its deadline."""
        return self.ends > self.deadline


def batches(seed: int, load: float = LOAD) -> list[Simulated]:
    """Two days of batches that need this share of the servers: many small ones, some large."""
    chance = random.Random(seed)
    found, work = list[Simulated](), 0.0
    while work < load * 48 * HOUR * SPEED:
        is_large = chance.random() < 0.1
        hours = 24.0 if is_large else 1.0
        tokens = SPEED * HOUR * (chance.uniform(1.0, 3.0) if is_large else chance.uniform(0, 0.15))
        found.append(Simulated(chance.uniform(0, 48 * HOUR), hours * HOUR, tokens))
        work += tokens
    return sorted(found, key=lambda each: each.arrives)


def first_come(_waiting: Sequence[Simulated], _now: float) -> int:
    """The index of the batch that came first."""
    return 0


def by_deadline(error: float = 1.0) -> Callable[[Sequence[Simulated], float], int]:
    """The choice of `policy.deadlines`, where the measured speed is wrong by a factor `error`."""

    def pick(waiting: Sequence[Simulated], now: float) -> int:
        due = [Due("a", each.deadline, each.left) for each in waiting]
        return choose(due, {}, error * SPEED, now)

    return pick


def missed(found: Sequence[Simulated], pick: Callable[[Sequence[Simulated], float], int]) -> float:
    """Serve all batches, some seconds of one batch at a time; the share that is late."""
    now, coming, waiting = 0.0, list(found), list[Simulated]()
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0].arrives)
        while coming and coming[0].arrives <= now:
            waiting.append(coming.pop(0))
        batch = waiting[pick(waiting, now)]
        seconds = min(STEP_S, batch.left / SPEED)
        now += seconds
        batch.left -= seconds * SPEED
        if batch.left <= 0.5:
            batch.ends = now
            waiting.remove(batch)
    return sum(each.is_late for each in found) / len(found)
