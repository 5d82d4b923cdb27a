"""The load of `bench_queue`: prompts in blocks, and how the requests of a block are sent."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmark.harness.configuration import Configuration
from benchmark.harness.journal import digest
from benchmark.harness.run import Run
from benchmark.harness.server import Server, ServerError
from benchmark.harness.serving import SLOWEST_TOKENS_PER_S, Raw, Sent, checked, serve, warm_up
from benchmark.harness.session import turned


@dataclass(frozen=True)
class Block:
    """Prompts of one group that are sent as one queue to a server with an empty cache."""

    group: str
    part: int
    """Number of the block in its group, from 0."""
    prompts: tuple[str, ...]
    """In the model's chat template."""


@dataclass(frozen=True)
class Load:
    """All blocks, and how their requests are sent."""

    blocks: tuple[Block, ...]
    max_new_tokens: int
    request_rate: float
    """Arrivals per second; infinite if all requests of a block arrive at once."""

    @property
    def digest(self) -> str:
        return digest((self.blocks, self.max_new_tokens, str(self.request_rate)))

    def block(self, cell: Cell) -> Block:
        """The block that a cell serves."""
        key = (cell.group, cell.part)
        return next(block for block in self.blocks if (block.group, block.part) == key)


@dataclass(frozen=True)
class Cell:
    """A configuration's turn at a block."""

    round: int
    """From 1."""
    group: str
    part: int
    config: str

    def __str__(self) -> str:
        return f"{self.group} {self.part + 1}, {self.config}"


def cells_of(blocks: Sequence[Block], configs: Sequence[str], rounds: int) -> list[Cell]:
    """Every block by all configurations, in an order that reverses from block to block."""
    served = [(number, block) for number in range(1, rounds + 1) for block in blocks]
    return [
        Cell(number, block.group, block.part, config)
        for place, (number, block) in enumerate(served, 1)
        for config in turned(configs, place)
    ]


def blocks_of(prompts: Mapping[str, Sequence[str]], size: int) -> tuple[Block, ...]:
    """Each group in the fewest parts of at most `size` prompts, of sizes that differ by one."""
    blocks = []
    for group, members in prompts.items():
        parts = -(-len(members) // size)
        cuts = [part * len(members) // parts for part in range(parts + 1)]
        blocks += [
            Block(group, part, tuple(members[cuts[part] : cuts[part + 1]])) for part in range(parts)
        ]
    return tuple(blocks)


def arrival_times(count: int, rate: float) -> list[float]:
    """Seconds from the start to each arrival: a Poisson process of `rate` per second, repeatable.

    The first request arrives at once; with an infinite rate all requests do.
    """
    # expovariate(inf) is 0.
    gaps = random.Random(0)
    return list(accumulate((gaps.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def measure(server: Server, configuration: Configuration, block: Block, load: Load) -> Run:
    """Serve a block by a server of the configuration; errors as in `harness.serving.serve`."""
    requests = 2 * configuration.settings.slots
    return serve(
        server,
        Queue(server, configuration, block, load).send,
        lambda: warm_up(server, requests, {"temperature": 0}),
        has_sidecar=configuration.has_sidecar,
    )


class Queue:
    """The requests of one block, each sent at its arrival by a thread of its own."""

    def __init__(
        self, server: Server, configuration: Configuration, block: Block, load: Load
    ) -> None:
        self._server = server
        self._prompts = block.prompts
        self._arrivals = arrival_times(len(block.prompts), load.request_rate)
        self._sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": load.max_new_tokens}
        if configuration.custom_params:
            self._sampling["custom_params"] = dict(configuration.custom_params)
        # Every request may have to wait for all others.
        most_tokens = len(block.prompts) * load.max_new_tokens
        self._timeout = 120.0 + self._arrivals[-1] + most_tokens / SLOWEST_TOKENS_PER_S

    def send(self) -> Sent:
        """Send all requests; one that fails is sent again. Raises ServerError or OSError then."""
        pool = ThreadPoolExecutor(len(self._prompts))
        served = functools.partial(self._served, time.monotonic())
        try:
            found = list(pool.map(served, range(len(self._prompts))))
        finally:
            # After an error or an interrupt the server is stopped, which ends what still waits.
            pool.shutdown(wait=False, cancel_futures=True)
        answers, latencies, attempts = zip(*found, strict=True)
        return Sent(answers, latencies, retried=sum(attempts) - len(attempts))

    def _served(self, began: float, index: int) -> tuple[Raw, float, int]:
        """The answer, its latency in seconds, and the number of attempts."""
        arrival = began + self._arrivals[index]
        time.sleep(max(0.0, arrival - time.monotonic()))
        attempts = 1
        try:
            answer = self._ask(index)
        except (ServerError, OSError):
            attempts = 2
            answer = self._ask(index)
        return answer, time.monotonic() - arrival, attempts

    def _ask(self, index: int) -> Raw:
        body = {"text": self._prompts[index], "sampling_params": self._sampling}
        return checked(self._server.post("/generate", body, self._timeout))
