"""Simulates one group, a sidecar with its targets, and summarizes its answers."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.clock import Clock
from sglang_qspec.tools.plan.requests import SimulatedRequest, agreed_tokens
from sglang_qspec.tools.plan.sidecar import Sidecar
from sglang_qspec.tools.plan.target import NONE, PassCounts, SimulatedTarget
from sglang_qspec.tools.plan.trace import Arrival

LEAST_S = 1e-9
"""Least seconds of a simulation. Tables may say that a prefill takes no time."""


@dataclass(frozen=True)
class Group:
    """What is simulated: one sidecar and its targets."""

    pipeline: str
    """`none`, or one of `config.MODES`."""
    slots: int
    """Requests that run at once on a target."""
    targets: int = 1
    delay: float = 0.0
    """Seconds that a message takes between target and sidecar."""
    outages: tuple[tuple[float, float], ...] = ()
    """(begin, end) times at which the sidecar is down."""
    seed: int = 1


@dataclass(frozen=True)
class GroupFigures:
    """Figures of a simulated group. Times are in seconds."""

    requests: int
    tokens: int
    """Output tokens."""
    seconds: float
    """From the start to the last answer."""
    latencies: tuple[float, ...]
    """From each arrival to the end of the answer, in rising order."""
    first_tokens: tuple[float, ...]
    """From each arrival to the first output token, in rising order."""
    service: float
    """Mean seconds from the start of a prefill to the end of the answer."""
    tokens_per_pass: float
    """Mean output tokens of a request in a pass; the prefill counts as none."""
    batch: float
    """Mean number of requests in a pass."""
    waited: float
    """Share of the time in which a target waited for drafts."""
    sidecar_busy: float
    """Share of the time in which the sidecar drafted."""

    pass_seconds: float
    """Mean time of a pass, without waits."""
    passes: int
    """Passes of all targets after the prefills."""
    drafted: int
    """Draft tokens that the sidecar sent."""
    steady_rate: float
    """Output tokens per second while requests wait, so without the end of a batch; `rate` if the
    requests never took all slots of a target."""

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def latency(self) -> float:
        """Mean latency."""
        return sum(self.latencies) / len(self.latencies)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of rising `values` that at least this share of them does not exceed."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def simulate(
    group: Group,
    tables: Tables,
    arrivals: Sequence[Arrival],
    *,
    before: Sequence[Arrival] = (),
) -> GroupFigures:
    """Serve the arrivals; the targets of the group get them in turn.

    The targets have served the arrivals `before` earlier, so their policies have learnt from these.
    An outage must not be combined with them.
    """
    clock = Clock()
    sidecar = Sidecar(clock, tables, group.delay, group.outages)
    agreement = tables.agreement_of("queue" if group.pipeline == "queue" else "step")
    targets = [
        SimulatedTarget(
            clock,
            tables,
            sidecar,
            group.pipeline,
            group.slots,
            np.random.default_rng((group.seed, number)),
        )
        for number in range(group.targets)
    ]

    def send(part: Sequence[Arrival], key: int) -> list[SimulatedRequest]:
        requests = []
        for number, arrival in enumerate(part):
            rng = np.random.default_rng((group.seed, key, number))
            agreed = agreed_tokens(agreement, arrival.output, rng)
            arrival_here = arrival._replace(seconds=clock.now + arrival.seconds)
            requests.append(SimulatedRequest(arrival_here, agreed, f"{key} {number}"))
            target = targets[number % len(targets)]
            clock.call(arrival.seconds, partial(target.arrive, requests[-1]))
        return requests

    if group.pipeline != NONE:
        clock.start(sidecar.run())
    for target in targets:
        clock.start(target.serve())
    with _without_warnings():
        if before:
            send(before, 2)
            clock.run()
            sidecar.busy_seconds, sidecar.drafted = 0.0, 0
            for target in targets:
                target.counts = PassCounts()
        began = clock.now
        requests = send(arrivals, 1)
        clock.run()
    return _figures(requests, targets, sidecar, began)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the policies, which warn about the sources that they pause."""
    logger = logging.getLogger("sglang_qspec.policy")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _figures(
    requests: Sequence[SimulatedRequest],
    targets: Sequence[SimulatedTarget],
    sidecar: Sidecar,
    began: float,
) -> GroupFigures:
    ends = [request.finished for request in requests if request.finished is not None]
    assert len(ends) == len(requests)
    seconds = max(LEAST_S, max(ends) - began)
    firsts = [(request.first or 0.0) - request.arrival.seconds for request in requests]
    latencies = [end - each.arrival.seconds for end, each in zip(ends, requests, strict=True)]
    served = [end - (each.admitted or 0.0) for end, each in zip(ends, requests, strict=True)]
    tokens = sum(request.done for request in requests)
    passes = sum(target.counts.passes for target in targets)
    pass_requests = sum(target.counts.pass_requests for target in targets)
    steady = [target.counts.steady_seconds or seconds for target in targets]
    return GroupFigures(
        requests=len(requests),
        tokens=tokens,
        seconds=seconds,
        latencies=tuple(sorted(latencies)),
        first_tokens=tuple(sorted(firsts)),
        service=sum(served) / len(served),
        tokens_per_pass=(tokens - len(requests)) / max(1, pass_requests),
        batch=pass_requests / max(1, passes),
        waited=sum(target.counts.waited for target in targets) / seconds / len(targets),
        pass_seconds=sum(target.counts.seconds for target in targets) / max(1, passes),
        sidecar_busy=min(1.0, sidecar.busy_seconds / seconds),
        passes=passes,
        drafted=sidecar.drafted,
        steady_rate=tokens * len(targets) / sum(steady),
    )
