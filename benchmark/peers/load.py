"""Keeps a number of requests in flight at a server, and measures them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from benchmark.harness.others import Others
from benchmark.harness.rounds import in_turn
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
    return in_turn(first, rounds)


def lengths_of(prompts: Sequence[Sequence[int]], tokens: int, spread: float) -> list[int]:
    """Lengths of the answers, in tokens: `tokens` on average, and up to `spread` of it apart.

    The length depends on the prompt only. `spread` is from 0 to 1.
    """
    most = round(tokens * spread)
    draws = (random.Random(str(list(prompt))) for prompt in prompts)
    return [max(1, tokens + draw.randint(-most, most)) for draw in draws]


def serve(
    server: Server,
    cell: Cell,
    warm_up: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> Run:
    """Warm up with other prompts, then answer `prompts` with as many tokens as `lengths` says.

    Raises ServerError or OSError.
    """

    def answer(prompt: Sequence[int], length: int) -> Answer:
        began = time.monotonic()
        found = ask(cell.config, server, prompt, length)
        seconds = time.monotonic() - began
        return replace(found, latency=seconds, service=seconds)

    with ThreadPoolExecutor(cell.in_flight) as pool:
        list(pool.map(answer, warm_up, [WARM_UP_TOKENS] * len(warm_up)))
        began, others = time.monotonic(), Others(server)
        answers = tuple(pool.map(answer, prompts, lengths))
        return Run(time.monotonic() - began, answers, others.share())
