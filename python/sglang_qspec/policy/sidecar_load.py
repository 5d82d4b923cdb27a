"""Estimates how soon each of several sidecars would draft for one more request.

A weight follows the sidecar's Heartbeat. It is a power of two with hysteresis, so that a small
change of the load does not move prompts to another sidecar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_qspec.messages import Heartbeat
from sglang_qspec.theory import Curve

FULL = 16
"""Number of pending requests of a sidecar that halve its weight."""
TURN = 0.75
"""Distance between logarithm and level above which the level changes; 0.5 would be rounding."""
LEAST = 2.0**-4
"""Smallest weight, relative to the largest."""


class Level:
    """The rounded base-2 logarithm of a changing value, with hysteresis."""

    def __init__(self) -> None:
        self.value: int | None = None
        """The level; None before the first value."""

    def follow(self, value: float) -> None:
        """Note the present `value`, which is over 0."""
        exact = math.log2(value)
        if self.value is None or abs(exact - self.value) > TURN:
            self.value = round(exact)


class SidecarLoad:
    """Speed and queue of one sidecar."""

    def __init__(self) -> None:
        self._speed = Level()
        self._queue = Level()

    def observe(self, heartbeat: Heartbeat | None) -> None:
        """Note the latest heartbeat; None before the first."""
        if heartbeat is None:
            return
        self._queue.follow(queue_of(heartbeat))
        if heartbeat.step_times and (seconds := heartbeat.step_times[0][1]) > 0:
            self._speed.follow(seconds)

    @property
    def speed(self) -> int | None:
        """Level of the seconds of a small step pass; None before the first such pass."""
        return self._speed.value

    @property
    def queue(self) -> int:
        """Level of the queue; 0 is an idle sidecar."""
        return self._queue.value or 0


def queue_of(heartbeat: Heartbeat) -> float:
    """Factor by which the sidecar's pending work delays a further request; 1 if it is idle.

    An overloaded sidecar skips work, so the factor grows with its `OverloadLevel`.
    """
    return (1.0 + heartbeat.requests / FULL) * (1 + heartbeat.overload)


def weights_of(loads: Mapping[str, SidecarLoad]) -> dict[str, float]:
    """Weight of each sidecar, at least LEAST; the best one has 1.

    A sidecar of unknown speed counts as the fastest one, so that it gets requests.
    """
    fastest = min((load.speed for load in loads.values() if load.speed is not None), default=0)
    levels = {
        name: (fastest if load.speed is None else load.speed) + load.queue
        for name, load in loads.items()
    }
    best = min(levels.values(), default=0)
    return {name: max(LEAST, 2.0 ** (best - level)) for name, level in levels.items()}


def joint_step_times(
    measured: Sequence[Sequence[tuple[float, float]]],
) -> list[tuple[float, float]]:
    """Seconds of a draft step by the number of requests, if the sidecars divide them evenly.

    Each entry of `measured` has (completions, seconds) points of one sidecar, smallest size first.
    The slowest sidecar decides, because the target waits for the drafts of all requests of a pass.
    """
    known = [points for points in measured if points]
    if len(known) <= 1:
        return list(known[0]) if known else []
    curves = [Curve.through(points) for points in known]
    sizes = sorted({size for points in known for size, _ in points})
    return [(size * len(known), max(curve(size) for curve in curves)) for size in sizes]
