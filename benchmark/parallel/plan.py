"""What is compared, and in which order it is served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

BASELINE = "none"
BASELINE_ALL_CORES = "none-equal"
BASELINES = (BASELINE, BASELINE_ALL_CORES)
SEQUENTIAL = "sequential"
SEQUENTIAL_HALF = "sequential-half"
HALVES = "halves"
AHEAD = "ahead"
QUEUE = "queue"
AUTO = "auto"
AUTO_STEP = "auto-step"

LEAD = 16
"""How far drafts run ahead of what is committed where k does not say it; a server's default."""


@dataclass(frozen=True)
class Pipeline:
    """How a server with a sidecar drafts; set on the running server."""

    mode: int
    """Of `qspec_mode`."""
    sources: tuple[str, ...] = ()
    """That drafts may come from; all if empty."""
    fixed: bool = True
    """Whether each pass verifies k draft tokens of each request, or what its drafts deserve."""
    doubled: bool = False
    """Whether drafts run up to two passes ahead of what is committed."""

    def runtime(self, k: int) -> dict[str, int]:
        """For the server: `k` draft tokens of a request in a pass, at most."""
        return {
            "qspec_mode": self.mode,
            "qspec_draft_token_num": k + 1,
            "qspec_step_tokens": 2 * k + 1 if self.doubled else max(LEAD, k),
            "qspec_fixed_width": int(self.fixed),
        }


_STEP = ("step",)
PIPELINES: Mapping[str, Pipeline] = {
    AUTO: Pipeline(4, fixed=False),
    AUTO_STEP: Pipeline(4, _STEP, fixed=False),
    QUEUE: Pipeline(0, ("queue",), fixed=False),
    AHEAD: Pipeline(3, _STEP, doubled=True),
    SEQUENTIAL: Pipeline(1, _STEP),
    HALVES: Pipeline(2, _STEP),
    SEQUENTIAL_HALF: Pipeline(1, _STEP),
}
"""What is compared closely is served one after the other."""
NAMES = (BASELINE_ALL_CORES, BASELINE, *PIPELINES)
OTHERS = (QUEUE, AHEAD, SEQUENTIAL, HALVES)
"""What `auto` chooses from."""

DESCRIPTIONS = {
    BASELINE: "no speculation, on the target's cores",
    BASELINE_ALL_CORES: "no speculation, on the cores of target and sidecar",
    SEQUENTIAL: "the sidecar drafts k tokens for all requests, then the target verifies them",
    SEQUENTIAL_HALF: "sequential with half of the requests in flight, for the paper's comparison",
    HALVES: "one half of the requests is verified while the sidecar drafts for the other",
    AHEAD: "the sidecar drafts ahead of what is being verified",
    QUEUE: "drafts made while requests wait, and none after",
    AUTO: "the server's own choice, with drafts from all sources",
    AUTO_STEP: "the server's own choice, with drafts of served requests alone",
}


@dataclass(frozen=True)
class Block:
    """Configurations that serve the same prompts one after the other."""

    round: int
    """From 1; rounds of streaming are counted by themselves."""
    in_flight: int
    """Requests that run at once."""
    k: int
    """Draft tokens of a request in a pass, at most."""
    streamed: bool
    """Whether the client reads tokens as they come."""
    configs: tuple[str, ...]
    """In the order in which they are served."""


def running(config: str, in_flight: int) -> int:
    """How many requests a configuration runs at once in a block."""
    return in_flight // 2 if config == SEQUENTIAL_HALF else in_flight


def blocks_of(
    configs: Iterable[str],
    ks: Sequence[int],
    levels: Sequence[int],
    rounds: int,
    streaming_rounds: int,
) -> list[Block]:
    """All blocks, each round in the order opposite to the one before.

    The baselines do not depend on k, so they are served with the largest alone, and what needs two
    halves is not served with one request in flight. Streaming is with k = 4, or the nearest, and
    without `none-equal`, whose target leaves the client no core.
    """
    chosen = [name for name in NAMES if name in set(configs)]
    streamed_k = min(ks, key=lambda k: (abs(k - 4), k))
    blocks = []
    for number in range(1, rounds + streaming_rounds + 1):
        streamed = number > rounds
        served = [
            Block(
                number - rounds if streamed else number,
                in_flight,
                k,
                streamed,
                _turned(_served(chosen, in_flight, k == max(ks), streamed), number),
            )
            for in_flight in levels
            for k in ([streamed_k] if streamed else ks)
        ]
        blocks += served if number % 2 else served[::-1]
    return [block for block in blocks if block.configs]


def _served(
    configs: Iterable[str], in_flight: int, widest: bool, streamed: bool
) -> tuple[str, ...]:
    """Those that can be, and have to be. A client that reads tokens as they come needs a core."""
    left_out = set()
    if in_flight == 1:
        left_out |= {HALVES, SEQUENTIAL_HALF}
    if streamed:
        left_out |= {BASELINE_ALL_CORES, SEQUENTIAL_HALF}
    elif not widest:
        left_out |= set(BASELINES)
    return tuple(name for name in configs if name not in left_out)


def _turned(configs: tuple[str, ...], number: int) -> tuple[str, ...]:
    """In the order of the round."""
    return configs if number % 2 else configs[::-1]


def mixed(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The prompts of all groups in turn, one of each."""
    turns = zip_longest(*groups.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def prompts_of(block: Block, prompts: Sequence[str], per_slot: int) -> list[str]:
    """Those of a block, the same for all k and others in each round, as far as there are others.

    `per_slot` of them for each request in flight, and at least six; streamed, one for each.
    """
    count = block.in_flight if block.streamed else max(6, per_slot * block.in_flight)
    count = min(count, len(prompts))
    first = (block.round - 1) * count
    return [prompts[index % len(prompts)] for index in range(first, first + count)]
