"""Servers at the protocol level: each keeps a number of requests at the sidecar."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmark.fleet.serving import FINGERPRINT
from sglang_qspec.link import Delivery, LinkState, SidecarLink
from sglang_qspec.messages import PROTOCOL, Close, Declined, Drafted, Hello, Submit

IDS = 1000
"""Prompts consist of the ids below this."""
VOCAB_SIZE = 1 << 20
"""Number of token ids of the targets: more than any draft model has, so all of its logits count."""
PAUSE_S = 0.0002
"""Pause, in seconds, after a round in which no tenant received a message."""


@dataclass
class Demand:
    """What each tenant asks for. Lengths are in tokens."""

    in_flight: int
    prompt: int
    tokens: int
    completions: int


@dataclass
class Tenant:
    """One server, which submits the next request when all drafts of one have arrived."""

    link: SidecarLink
    demand: Demand
    rng: random.Random
    received: int = 0
    """Number of draft tokens received."""
    declined: int = 0
    seconds: list[float] = field(default_factory=list)
    """Time of each request from its Submit to its last draft token."""
    _open: dict[int, tuple[float, set[int]]] = field(default_factory=dict)
    """Time of the Submit, and unfinished completions, of each open submission."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def poll(self) -> int:
        """Read messages and submit requests; returns the number of messages."""
        messages = self.link.receive()
        for message in messages:
            if isinstance(message, Drafted) and message.submission in self._open:
                self._note(message)
            elif isinstance(message, Declined):
                self.declined += 1
                self._open.pop(message.submission, None)
        while len(self._open) < self.demand.in_flight and self.link.state is LinkState.READY:
            number = next(self._numbers)
            token_ids = self.rng.choices(range(IDS), k=self.demand.prompt)
            count = self.demand.completions
            asked = Submit(number, token_ids, 0, self.demand.tokens, count, 0.6, ignore_eos=True)
            if self.link.send(asked) is not Delivery.TAKEN:
                break
            self._open[number] = time.monotonic(), set(range(count))
        return len(messages)

    def _note(self, drafted: Drafted) -> None:
        self.received += len(drafted.token_ids)
        began, unfinished = self._open[drafted.submission]
        if drafted.finished:
            unfinished.discard(drafted.completion)
            if not unfinished:
                del self._open[drafted.submission]
                self.seconds.append(time.monotonic() - began)
                self.link.send(Close(drafted.submission))


def run(
    endpoint: str,
    count: int,
    demand: Demand,
    warm_up_s: float,
    seconds: float,
    is_over: Callable[[], bool],
) -> dict[str, float]:
    """Run `count` tenants, and measure `seconds` after the warm-up.

    The tenants go on until `is_over`, because the measurement of the sidecar begins and ends later.
    `fairness` is the tokens of the tenant with the fewest over the mean of all tenants.
    """
    hello = Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT)
    tenants = [Tenant(SidecarLink(endpoint, hello), demand, random.Random(n)) for n in range(count)]
    try:
        _poll(tenants, warm_up_s)
        for tenant in tenants:
            tenant.received, tenant.seconds = 0, []
        cpu_s = time.process_time()
        _poll(tenants, seconds)
        cpu_s = time.process_time() - cpu_s
        received = [tenant.received for tenant in tenants]
        times = [each for tenant in tenants for each in tenant.seconds]
        while not is_over():
            _poll(tenants, 0.05)
    finally:
        for tenant in tenants:
            tenant.link.close()
    return {
        "received_per_s": sum(received) / seconds,
        "fairness": min(received) / max(1e-9, statistics.mean(received)),
        "request_ms": statistics.median(times) * 1e3 if times else float("nan"),
        "tenants_cpu": cpu_s / seconds,
        "declined": float(sum(tenant.declined for tenant in tenants)),
    }


def _poll(tenants: list[Tenant], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not sum(tenant.poll() for tenant in tenants):
            time.sleep(PAUSE_S)
