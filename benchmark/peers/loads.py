"""The loads of `bench_peers`: cells, and the prompts of each cell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmark.harness.cells import Cell, Value, in_turn
from benchmark.harness.dataset import of_round
from benchmark.peers.pipelines import HALVES, PIPELINES, without_k
from benchmark.peers.servers import OWN

STEADY, QUEUED = "steady", "queue"
ARRIVALS = ("wave", "mixed", QUEUED)
"""The arrivals of `--matrix`."""
QUEUE = 3
"""Number of requests of a queue, over those in flight."""


def loads_of(options: argparse.Namespace) -> list[dict[str, Value]]:
    """All loads in the order of serving."""
    return [
        {"in_flight": level, "arrival": arrival, "sampling": sampling}
        for sampling in options.samplings
        for arrival in options.arrivals
        for level in options.levels
    ]


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All cells; every second round has the reverse order.

    Peers have the greedy loads only. Only pipelines have k, the maximum number of draft tokens of a
    request in a pass; other configurations come with the first k. A single request has no halves.
    """
    first = []
    for load in loads_of(options):
        for k in options.k:
            for config in options.configs:
                if config == HALVES and load["in_flight"] == 1:
                    continue
                if config in PIPELINES:
                    first.append(Cell.of(1, config, **load, k=k))
                elif k == options.k[0] and (config in OWN or load["sampling"] == "greedy"):
                    first.append(Cell.of(1, config, **load))
    return in_turn(first, options.rounds)


def prompts_of(
    cell: Cell, prompts: Sequence[list[int]], options: argparse.Namespace
) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a cell's warm-up, one for each request in flight, and the measured ones.

    Each load of each round has prompts of its own, until the file has no more; they are the same
    for all k.
    """
    in_flight = cell["in_flight"]
    counts = {STEADY: options.prompts, QUEUED: QUEUE * in_flight}
    count = counts.get(cell["arrival"], in_flight)
    each = max(options.prompts, QUEUE * max(options.levels)) + max(options.levels)
    loads = loads_of(options)
    number = 1 + (cell.round - 1) * len(loads) + loads.index(without_k(dict(cell.load)))
    found = of_round(prompts, each, number)
    return found[count : count + in_flight], found[:count]
