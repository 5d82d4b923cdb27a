"""Measures the tries: the time of a step in the scheduler, the time of insertion, and memory.

The benchmark replays recorded requests, each with 8 completions. A step commits the tokens that the
last pass accepted, and proposes 8 draft tokens for every request; the benchmark times only steps.

    python -m benchmark.bench_trie

The last line is JSON: `step_ms_64`, `step_ms_1024`, `insert_tokens_per_s`, `bytes_per_token`, and
`step_ms` by number of live requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.harness.options import parser_of, positive
from benchmark.harness.output import print_record
from sglang_qspec.trie import Source, TrieLimits, TrieStore

WIDTH = 9
"""Nodes of a tree: 8 draft tokens and the root."""
VOCAB = 1 << 18
CHUNK = 4
"""Tokens of a completion in one message of a sidecar."""
OWN = Path(__file__).parent / "completions.json"
"""Completions of our own prompts by the demo models."""
Ids = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class Recorded:
    """A recorded request, in token ids."""

    prompt_ids: list[int]
    target_ids: list[int]
    draft_ids: list[list[int]]
    """Completions; the first is greedy."""


def load(path: Path) -> list[Recorded]:
    """Read a recording."""
    return [Recorded(**record) for record in json.loads(path.read_text(encoding="utf-8"))]


def accepted(
    token_ids: Ids, parents: Ids, size: int, target_ids: list[int], done: int
) -> list[int]:
    """The nodes of a tree of `size` nodes that greedy verification accepts after `done` tokens."""
    nodes: list[int] = []
    at = 0
    for token in target_ids[done:]:
        for node in range(at + 1, size):
            if parents[node] == at and token_ids[node] == token:
                at = node
                nodes.append(node)
                break
        else:
            break
    return nodes


class LiveRequest:
    """A recorded request, and its progress."""

    _numbers = itertools.count()

    def __init__(self, recorded: Recorded) -> None:
        self.rid = f"r{next(self._numbers)}"
        self.recorded = recorded
        self.done = 1
        self.fresh = recorded.target_ids[:1]

    @property
    def output_ids(self) -> list[int]:
        return self.recorded.target_ids[: self.done]

    @property
    def ended(self) -> bool:
        return self.done >= len(self.recorded.target_ids)


class Tries:
    """The tries of a server, one for each request."""

    def __init__(self) -> None:
        self.store = TrieStore(TrieLimits(vocab_size=VOCAB, max_total_tokens=1 << 26))

    def open(self, live: LiveRequest) -> None:
        self.begin(live)
        self.insert(live)

    def begin(self, live: LiveRequest) -> None:
        self.store.open(live.rid, live.recorded.prompt_ids)

    def insert(self, live: LiveRequest, chunk: int | None = None) -> None:
        trie = self.store.get(live.rid)
        assert trie is not None
        for number, draft in enumerate(live.recorded.draft_ids):
            size = chunk or max(1, len(draft))
            for start in range(0, len(draft), size):
                place = (live.rid, trie.serial, Source.QUEUE, number, 0, start)
                self.store.insert(*place, draft[start : start + size], greedy=number == 0)

    def close(self, live: LiveRequest) -> None:
        self.store.close(live.rid)

    def step(self, batch: Sequence[LiveRequest]) -> Any:
        for live in batch:
            self.store.commit(live.rid, live.fresh)
        rids = [live.rid for live in batch]
        return self.store.propose(rids, [live.fresh[-1] for live in batch], WIDTH)


def main() -> None:
    options = _options()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    requests = load(options.recording)
    times = steps(requests, options.live, options.steps)
    step_ms = {count: statistics.median(ms) for count, ms in times.items()}
    insert, chunked = insertion(requests)
    record = {
        "benchmark": "trie",
        "step_ms_64": step_ms.get(64),
        "step_ms_1024": step_ms.get(1024),
        "step_ms": step_ms,
        "insert_tokens_per_s": insert,
        "insert_tokens_per_s_in_chunks": chunked,
        "bytes_per_token": bytes_per_token(requests),
    }
    for count, ms in step_ms.items():
        print(f"{count:5} live requests: {ms:7.3f} ms a step, {ms / count * 1e3:5.2f} us each")
    print(f"insertion: {insert / 1e6:.2f} M tokens/s, {chunked / 1e6:.2f} M in chunks of {CHUNK}")
    print(f"memory: {record['bytes_per_token']:.1f} bytes a draft token")
    print_record(record)


def steps(requests: list[Recorded], counts: Iterable[int], rounds: int) -> dict[int, list[float]]:
    """Milliseconds of each step, by number of live requests.

    The requests advance by the proposals. New requests replace finished ones outside the timed
    part.
    """
    found: dict[int, list[float]] = {}
    supply = itertools.cycle(requests)
    for count in counts:
        tries = Tries()
        batch = [_started(next(supply), offset) for offset in range(count)]
        for live in batch:
            tries.open(live)
        times = found[count] = []
        for _ in range(rounds):
            began = time.perf_counter()
            trees = tries.step(batch)
            times.append((time.perf_counter() - began) * 1e3)
            for row, live in enumerate(batch):
                _advance(live, trees, row)
                if live.ended:
                    tries.close(live)
                    batch[row] = LiveRequest(next(supply))
                    tries.open(batch[row])
    return found


def _started(recorded: Recorded, offset: int) -> LiveRequest:
    """A request in the middle of its output, as in a busy server."""
    live = LiveRequest(recorded)
    live.done = 1 + offset * 7 % max(1, len(recorded.target_ids) - 1)
    live.fresh = live.output_ids
    return live


def _advance(live: LiveRequest, trees: Any, row: int) -> None:
    target = live.recorded.target_ids
    size = trees.sizes[row]
    nodes = accepted(trees.token_ids[row], trees.parents[row], size, target, live.done)
    live.fresh = target[live.done : live.done + len(nodes) + 1]
    live.done += len(live.fresh)


def insertion(requests: list[Recorded], rounds: int = 5) -> tuple[float, float]:
    """Median draft tokens inserted per second: whole completions, and a sidecar's chunks."""
    rates: dict[int | None, list[float]] = {None: [], CHUNK: []}
    for _ in range(rounds):
        for chunk, found in rates.items():
            tries = Tries()
            batch = list(map(LiveRequest, requests))
            for live in batch:
                tries.begin(live)
            began = time.perf_counter()
            for live in batch:
                tries.insert(live, chunk)
            seconds = time.perf_counter() - began
            found.append(sum(map(_draft_tokens, requests)) / seconds)
    return statistics.median(rates[None]), statistics.median(rates[CHUNK])


def bytes_per_token(requests: list[Recorded]) -> float:
    """Bytes of the completions per token."""
    tries, used = Tries(), 0
    for live in map(LiveRequest, requests):
        tries.begin(live)
        trie = tries.store.get(live.rid)
        assert trie is not None
        before = trie.bytes
        tries.insert(live)
        used += trie.bytes - before
    return used / sum(map(_draft_tokens, requests))


def _draft_tokens(recorded: Recorded) -> int:
    return sum(map(len, recorded.draft_ids))


def _options() -> argparse.Namespace:
    parser = parser_of("bench_trie", __doc__)
    add = parser.add_argument
    add("--recording", type=Path, default=OWN, help="(default: completions.json)")
    add("--live", type=positive, nargs="+", default=[16, 64, 256, 1024], help="live requests")
    add("--steps", type=positive, default=200, help="timed steps (default: 200)")
    add("--core", type=int, help="processor to run on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
