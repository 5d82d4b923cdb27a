"""Plans the pipelines and the cells of `bench_batch_parallel`, in the order of serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness.cells import Cell, Value, turned
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import of_round

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

LOOKAHEAD = 16
"""Maximum number of draft tokens ahead of the committed output, unless k is larger."""


@dataclass(frozen=True)
class Pipeline:
    """Settings of a running server with a sidecar."""

    mode: int
    """Value of the setting `qspec_mode`."""
    sources: tuple[str, ...] = ()
    """Allowed draft sources; all if empty."""
    fixed: bool = True
    """Whether each pass verifies k draft tokens of each request, even if they do not pay."""
    doubled: bool = False
    """Whether drafts run up to two passes ahead of the committed output."""

    def runtime(self, k: int) -> dict[str, int]:
        """The settings for at most `k` draft tokens of a request in a pass."""
        return {
            "qspec_mode": self.mode,
            "qspec_draft_token_num": k + 1,
            "qspec_step_tokens": 2 * k + 1 if self.doubled else max(LOOKAHEAD, k),
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
"""The pipelines in the order of serving: pipelines that the report compares are neighbours."""
NAMES = (BASELINE_ALL_CORES, BASELINE, *PIPELINES)
OTHERS = (QUEUE, AHEAD, SEQUENTIAL, HALVES)
"""Pipelines that `auto` chooses from."""

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


SPECULATING = "qspec"
MEM_FRACTION = 0.05


def running(config: str, in_flight: int) -> int:
    """Requests that a configuration runs at once in a block."""
    return in_flight // 2 if config == SEQUENTIAL_HALF else in_flight


def cells_of(
    configs: Iterable[str],
    ks: Sequence[int],
    levels: Sequence[int],
    rounds: int,
    streaming_rounds: int,
) -> list[Cell]:
    """All cells; every second round has the reverse order.

    The baselines are served once for all k. Pipelines with halves are served from two requests in
    flight. Streaming rounds have k = 4, or the nearest, and leave out `none-equal`, which leaves no
    core to the client.
    """
    chosen = [name for name in NAMES if name in set(configs)]
    streamed_k = min(ks, key=lambda k: (abs(k - 4), k))
    cells: list[Cell] = []
    for number in range(1, rounds + streaming_rounds + 1):
        streamed = number > rounds
        block_round = number - rounds if streamed else number
        blocks = [(level, k) for level in levels for k in ([streamed_k] if streamed else ks)]
        for level, k in blocks if number % 2 else blocks[::-1]:
            served = _served(chosen, level, streamed or k == max(ks), streamed)
            cells += [
                Cell.of(block_round, name, **load_of(name, level, k, streamed))
                for name in turned(served, number)
            ]
    return cells


def load_of(config: str, in_flight: int, k: int, streamed: bool) -> dict[str, Value]:
    """The load of a cell.

    It has the requests in flight of the block; `sequential-half` runs half of them. Except for the
    baselines it has k, the maximum number of draft tokens of a request in a pass. If the client
    reads tokens as they come, it is `streamed`.
    """
    found: dict[str, Value] = {"in_flight": in_flight}
    found |= {} if config in BASELINES else {"k": k}
    return found | ({"streamed": True} if streamed else {})


def _served(
    configs: Iterable[str], in_flight: int, with_baselines: bool, streamed: bool
) -> list[str]:
    left_out: set[str] = set()
    if in_flight == 1:
        left_out |= {HALVES, SEQUENTIAL_HALF}
    if streamed:
        left_out |= {BASELINE_ALL_CORES, SEQUENTIAL_HALF}
    if not with_baselines:
        left_out |= set(BASELINES)
    return [name for name in configs if name not in left_out]


def prompts_of(cell: Cell, prompts: Sequence[str], per_slot: int) -> list[str]:
    """The prompts of a cell's block: the same for all k, and others in each round if there are any.

    A block has `per_slot` prompts for each request in flight, and at least six. A block of a
    streaming round has one prompt for each request in flight.
    """
    count = cell["in_flight"] if cell["streamed"] else max(6, per_slot * cell["in_flight"])
    return of_round(prompts, min(count, len(prompts)), cell.round)


def body_of(cell: Cell, prompts: Sequence[str], max_new_tokens: int) -> dict[str, Any]:
    """A request for greedy answers of exactly `max_new_tokens` to all prompts."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    sampling["ignore_eos"] = True
    if cell.config in PIPELINES and PIPELINES[cell.config].sources:
        sampling["custom_params"] = {"qspec_sources": list(PIPELINES[cell.config].sources)}
    return {"text": list(prompts), "sampling_params": sampling, "stream": bool(cell["streamed"])}


def configuration(config: str, settings: Settings, width: int) -> Configuration:
    """The server of `config`, one of NAMES.

    All pipelines share a server, and so one sidecar. `width` is the widest pass that the server can
    be set to, in tokens of a request.
    """
    if config == BASELINE:
        return Configuration(config, settings, (), settings.target_cores)
    if config == BASELINE_ALL_CORES:
        return Configuration(config, settings, (), settings.all_cores)
    widest = ("--speculative-num-draft-tokens", str(width))
    flags = settings.qspec(*widest, mem_fraction=MEM_FRACTION)
    return Configuration(SPECULATING, settings, flags, settings.target_cores)
