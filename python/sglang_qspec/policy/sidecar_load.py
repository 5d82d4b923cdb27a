"""Estimates what each of several sidecars would do for one more request.

A weight follows the drafts that passes accepted, which the server counts itself, and the sidecar's
Heartbeat. A heartbeat may lie, so it cannot draw many requests: what it says of the speed counts up
to a factor of CLAIM, and its queue is at least what the server itself waits for. A weight is a
power of two with hysteresis, so that a small change does not move prompts to another sidecar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_qspec.messages import Heartbeat
from sglang_qspec.policy.curve import Curve

FULL = 16
"""Number of pending requests of a sidecar that halve its weight."""
TURN = 0.75
"""Distance between logarithm and level above which the level changes; 0.5 would be rounding."""
LEAST = 2.0**-4
"""Smallest weight, relative to the largest."""
CLAIM = 1
"""Maximum number of levels that a sidecar loses to another one that says that it is faster."""
DOUBT = 64
"""Number of output tokens whose evidence counts as much as the assumption before any evidence."""
ASSUMED = 0.5
"""Part of the output that a sidecar drafts right, before any evidence; most are below, so that a
sidecar without evidence gets requests."""
MEMORY = 4096
"""Number of output tokens after which the evidence counts half."""


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
    """Speed, queue and use of one sidecar."""

    def __init__(self) -> None:
        self._speed = Level()
        self._queue = Level()
        self._use = Level()
        self._use.follow(ASSUMED)
        self._accepted = 0.0
        self._output = 0.0

    def count(self, accepted: int, output: int) -> None:
        """Note a pass of a request of this sidecar.

        Of the pass's `output` tokens, `accepted` are draft tokens of the sidecar.
        """
        self._accepted += accepted
        self._output += output
        if self._output > MEMORY:
            self._accepted /= 2
            self._output /= 2

    def observe(self, heartbeat: Heartbeat | None, unfinished: int = 0) -> None:
        """Note the latest heartbeat; None before the first.

        `unfinished` is the number of this server's requests with unfinished completions there.
        """
        self._use.follow((self._accepted + ASSUMED * DOUBT) / (self._output + DOUBT))
        if heartbeat is None:
            return
        self._queue.follow(queue_of(heartbeat, unfinished))
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

    @property
    def use(self) -> int:
        """Level of the part of the output that the sidecar drafts right."""
        return self._use.value or 0


def queue_of(heartbeat: Heartbeat, unfinished: int = 0) -> float:
    """Factor by which the sidecar's pending work delays a further request; 1 if it is idle.

    It waits for `unfinished` requests of this server at least. An overloaded sidecar skips work, so
    the factor grows with its `OverloadLevel`.
    """
    return (1.0 + max(heartbeat.requests, unfinished) / FULL) * (1 + heartbeat.overload)


def weights_of(loads: Mapping[str, SidecarLoad]) -> dict[str, float]:
    """Weight of each sidecar, at least LEAST; the best one has 1.

    A sidecar of unknown speed counts as the fastest one, so that it gets requests.
    """
    fastest = min((load.speed for load in loads.values() if load.speed is not None), default=0)
    levels = {
        name: min(CLAIM, (fastest if load.speed is None else load.speed) - fastest)
        + load.queue
        - load.use
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
