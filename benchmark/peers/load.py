"""Keeps a number of requests in flight at a server, and measures them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from benchmark.harness.others import Others
from benchmark.harness.run import Answer, Run
from benchmark.harness.server import Server
from benchmark.peers.servers import ask

WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Cell:
    """A server that answers the prompts of a round, with some number of requests in flight."""

    round: int
    """From 1."""
    in_flight: int
    config: str

    def __str__(self) -> str:
        return f"round {self.round}, {self.in_flight} in flight, {self.config}"


def cells_of(configs: Sequence[str], levels: Sequence[int], rounds: int) -> list[Cell]:
    """All cells; every second round has the reverse order."""
    first = [Cell(1, level, config) for level in levels for config in configs]
    return [
        replace(cell, round=number)
        for number in range(1, rounds + 1)
        for cell in (first if number % 2 else first[::-1])
    ]


def serve(
    server: Server,
    cell: Cell,
    warm_up: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    tokens: int,
) -> Run:
    """Warm up with other prompts, then answer `prompts`; `tokens` is the length of an answer.

    Raises ServerError or OSError.
    """

    def answer(length: int) -> Callable[[Sequence[int]], Answer]:
        def timed(prompt: Sequence[int]) -> Answer:
            began = time.monotonic()
            found = ask(cell.config, server, prompt, length)
            seconds = time.monotonic() - began
            return replace(found, latency=seconds, service=seconds)

        return timed

    with ThreadPoolExecutor(cell.in_flight) as pool:
        list(pool.map(answer(WARM_UP_TOKENS), warm_up))
        began, others = time.monotonic(), Others(server)
        answers = tuple(pool.map(answer(tokens), prompts))
        return Run(time.monotonic() - began, answers, others.share())
