"""What every configuration has to serve: prompts, in blocks that are one queue each."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec


@dataclass(frozen=True)
class Block:
    """Prompts of one group that are served as one queue, before which all caches are empty."""

    group: str
    part: int
    """Of the group, from 0."""
    prompts: tuple[str, ...]
    """In the model's chat template."""


@dataclass(frozen=True)
class Load:
    """Blocks, and how their requests are sent."""

    blocks: tuple[Block, ...]
    max_new_tokens: int
    request_rate: float
    """Arrivals per second; infinite for all of a block at once."""

    @property
    def digest(self) -> str:
        """The same for the same load only."""
        content = msgspec.json.encode((self.blocks, self.max_new_tokens, str(self.request_rate)))
        return hashlib.sha256(content).hexdigest()


def blocks_of(prompts: Mapping[str, Sequence[str]], size: int) -> tuple[Block, ...]:
    """Each group in as few parts of at most `size` prompts as will do, as equal as they can be."""
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

    The first request arrives at once, and with an infinite rate all of them do.
    """
    # expovariate(inf) is 0.
    gaps = random.Random(0)
    return list(accumulate((gaps.expovariate(rate) for _ in range(count - 1)), initial=0.0))
