"""The load of `bench_queue`: prompts in blocks, and the arrival of their requests."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmark.harness.cells import Cell, turned
from benchmark.harness.configuration import Configuration
from benchmark.harness.server import Server
from benchmark.harness.serving import Sent, send_each


@dataclass(frozen=True)
class Block:
    """Prompts of one group that are sent as one queue to a server with an empty cache."""

    group: str
    part: int
    """Number of the block in its group, from 0."""
    prompts: tuple[str, ...]
    """In the model's chat template."""


def cells_of(blocks: Sequence[Block], configs: Sequence[str], rounds: int) -> list[Cell]:
    """Every block by all configurations; every second block has the reverse order."""
    served = [(number, block) for number in range(1, rounds + 1) for block in blocks]
    return [
        Cell.of(number, config, group=block.group, part=block.part)
        for place, (number, block) in enumerate(served, 1)
        for config in turned(configs, place)
    ]


def blocks_of(prompts: Mapping[str, Sequence[str]], size: int) -> tuple[Block, ...]:
    """Divide each group into the fewest blocks of at most `size` prompts.

    The sizes of a group's blocks differ by at most one.
    """
    blocks = []
    for group, members in prompts.items():
        parts = -(-len(members) // size)
        cuts = [part * len(members) // parts for part in range(parts + 1)]
        blocks += [
            Block(group, part, tuple(members[cuts[part] : cuts[part + 1]])) for part in range(parts)
        ]
    return tuple(blocks)


def arrival_times(count: int, rate: float) -> list[float]:
    """Seconds from the start to each arrival: a Poisson process of `rate` per second.

    The times are the same in every run. The first request arrives at 0. With rate inf all requests
    arrive at 0.
    """
    # expovariate(inf) is 0.
    gaps = random.Random(0)
    return list(accumulate((gaps.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def send(
    server: Server,
    configuration: Configuration,
    prompts: Sequence[str],
    max_new_tokens: int,
    rate: float,
) -> Sent:
    """Send a request for each prompt at its arrival; errors as in `send_each`."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    if configuration.custom_params:
        sampling["custom_params"] = dict(configuration.custom_params)
    return send_each(server, prompts, sampling, arrival_times(len(prompts), rate))
