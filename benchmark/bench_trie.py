"""Measures the tries: the time of a step in the scheduler, the time of insertion, and memory.

The benchmark replays recorded requests, each with 8 completions. A step commits the tokens that the
last pass accepted, and proposes 8 draft tokens for every request; the benchmark times only steps.
Two other libraries take turns on the same text: SGLang's own `NgramCorpus`, with one trie for all
requests, and arctic-inference's suffix tree, one per request, if it is installed.

    python -m benchmark.bench_trie

The last line is JSON: `step_ms_64`, `step_ms_1024`, `insert_tokens_per_s`, `bytes_per_token` and
`peers`, and `step_ms` by number of live requests.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmark.harness.options import parser_of, positive
from benchmark.harness.output import print_record
from benchmark.harness.statistics import SPREADS, Ratio, ratio_record, rounded
from benchmark.replay import OWN, Recorded, accepted, load
from sglang_qspec.trie import Source, TrieLimits, TrieStore

WIDTH = 9
"""Nodes of a tree: 8 draft tokens and the root."""
VOCAB = 1 << 18
CHUNK = 4
"""Tokens of a completion in one message of a sidecar."""


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


class Contender(Protocol):
    """Something that proposes draft tokens for many requests."""

    name: str

    def open(self, live: LiveRequest) -> None:
        """Add a request with all its completions."""

    def close(self, live: LiveRequest) -> None:
        """Remove a request."""

    def step(self, batch: Sequence[LiveRequest]) -> Any:
        """Commit the fresh tokens of each request, and propose for all."""


class Ours:
    name = "sglang-qspec"

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


class Corpus:
    """NgramCorpus as `NGRAMWorker` uses it, with the last tokens of each request."""

    name = "SGLang NgramCorpus"
    depth = 18

    def __init__(self) -> None:
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        sizes = {"draft_token_num": WIDTH, "capacity": 1 << 24}
        self.corpus = NgramCorpus(max_trie_depth=self.depth, **sizes)

    def open(self, live: LiveRequest) -> None:
        self.corpus.batch_put([live.recorded.prompt_ids, *live.recorded.draft_ids])
        self.corpus.synchronize()

    def close(self, live: LiveRequest) -> None:
        self.corpus.erase_match_state([live.rid])

    def step(self, batch: Sequence[LiveRequest]) -> Any:
        tails = [self._tail(live) for live in batch]
        lengths = [len(live.recorded.prompt_ids) + live.done for live in batch]
        found = self.corpus.batch_get([live.rid for live in batch], tails, lengths)
        self.corpus.batch_put(tails)
        self.corpus.synchronize()
        return found

    def _tail(self, live: LiveRequest) -> list[int]:
        text = live.recorded.target_ids[max(0, live.done - self.depth) : live.done]
        missing = self.depth - len(text)
        return (live.recorded.prompt_ids[-missing:] if missing else []) + text


class Arctic:
    """One suffix tree per request, with its completions and its own text."""

    name = "arctic-inference"
    depth = 64
    own = 1 << 20
    """Number of the sequence that holds the request's own text."""

    def __init__(self) -> None:
        self.tree = import_module("arctic_inference.suffix_decoding._C").SuffixTree
        self.trees: dict[str, Any] = {}

    def open(self, live: LiveRequest) -> None:
        tree = self.trees[live.rid] = self.tree(self.depth)
        for number, draft in enumerate(live.recorded.draft_ids):
            tree.extend(number, draft)
        tree.extend(self.own, live.recorded.prompt_ids)

    def close(self, live: LiveRequest) -> None:
        del self.trees[live.rid]

    def step(self, batch: Sequence[LiveRequest]) -> Any:
        drafts = []
        for live in batch:
            tree = self.trees[live.rid]
            tree.extend(self.own, live.fresh)
            context = live.recorded.target_ids[max(0, live.done - self.depth) : live.done]
            drafts.append(tree.speculate(context, WIDTH - 1, 1.0, 0.0, 0.02, True))
        return [(draft.token_ids, draft.parents) for draft in drafts]


def main() -> None:
    options = _options()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    requests = load(options.recording)
    times = steps([Ours()], requests, options.live, options.steps)[Ours.name]
    step_ms = {count: statistics.median(ms) for count, ms in times.items()}
    insert, chunked = insertion(requests)
    others = peers(requests, options.steps)
    record = {
        "benchmark": "trie",
        "step_ms_64": step_ms.get(64),
        "step_ms_1024": step_ms.get(1024),
        "step_ms": step_ms,
        "insert_tokens_per_s": insert,
        "insert_tokens_per_s_in_chunks": chunked,
        "bytes_per_token": bytes_per_token(requests),
        "peers": others,
    }
    for count, ms in step_ms.items():
        print(f"{count:5} live requests: {ms:7.3f} ms a step, {ms / count * 1e3:5.2f} us each")
    print(f"insertion: {insert / 1e6:.2f} M tokens/s, {chunked / 1e6:.2f} M in chunks of {CHUNK}")
    print(f"memory: {record['bytes_per_token']:.1f} bytes a draft token")
    for name, figures in others.items():
        shown = (f"{key} {value}" for key, value in rounded(figures).items())
        print(f"{name}: " + ", ".join(shown))
    print(f"A round is a quarter of the steps. {SPREADS}")
    print_record(record)


def steps(
    contenders: Sequence[Contender], requests: list[Recorded], counts: Iterable[int], rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Milliseconds of each step, by contender and number of live requests; contenders take turns.

    The requests advance by the proposals of the first contender, so all contenders get the same
    steps. New requests replace finished ones outside the timed part.
    """
    found: dict[str, dict[int, list[float]]] = {contender.name: {} for contender in contenders}
    supply = itertools.cycle(requests)
    for count in counts:
        batch = [_started(next(supply), offset) for offset in range(count)]
        for contender, live in itertools.product(contenders, batch):
            contender.open(live)
        times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for _ in range(rounds):
            for contender in contenders:
                began = time.perf_counter()
                proposed = contender.step(batch)
                times[contender.name].append((time.perf_counter() - began) * 1e3)
                if contender is contenders[0]:
                    trees = proposed
            for row, live in enumerate(batch):
                _advance(live, trees, row)
                if live.ended:
                    for contender in contenders:
                        contender.close(live)
                    batch[row] = LiveRequest(next(supply))
                    for contender in contenders:
                        contender.open(batch[row])
        for contender, live in itertools.product(contenders, batch):
            contender.close(live)
        for name, values in times.items():
            found[name][count] = values
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
            ours = Ours()
            batch = list(map(LiveRequest, requests))
            for live in batch:
                ours.begin(live)
            began = time.perf_counter()
            for live in batch:
                ours.insert(live, chunk)
            seconds = time.perf_counter() - began
            found.append(sum(map(_draft_tokens, requests)) / seconds)
    return statistics.median(rates[None]), statistics.median(rates[CHUNK])


def bytes_per_token(requests: list[Recorded]) -> float:
    """Bytes of the completions per token."""
    ours, used = Ours(), 0
    for live in map(LiveRequest, requests):
        ours.begin(live)
        trie = ours.store.get(live.rid)
        assert trie is not None
        before = trie.bytes
        ours.insert(live)
        used += trie.bytes - before
    return used / sum(map(_draft_tokens, requests))


def _draft_tokens(recorded: Recorded) -> int:
    return sum(map(len, recorded.draft_ids))


def peers(requests: list[Recorded], rounds: int) -> dict[str, dict[str, Any]]:
    """`step_ms_64` of each installed peer, measured in turn with ours, and the ratio of medians."""
    contenders: list[Contender] = [Ours()]
    for peer in (Corpus, Arctic):
        try:
            contenders.append(peer())
        except ImportError as error:
            print(f"{peer.name} is left out: {error}", file=sys.stderr)
    found: dict[str, dict[str, Any]] = {}
    # Memory first: later allocations would reuse freed memory, which does not count.
    sizes = {peer.name: _peer_bytes(type(peer), requests) for peer in contenders[1:]}
    times = {name: ms[64] for name, ms in steps(contenders, requests, [64], rounds).items()}
    for contender in contenders[1:]:
        ms = times[contender.name]
        found[contender.name] = {
            "step_ms_64": statistics.median(ms),
            **ratio_record("times_ours", Ratio.of_times(ms, times[Ours.name])),
            "bytes_per_token": sizes[contender.name],
        }
    return found


def _peer_bytes(peer: type[Contender], requests: list[Recorded]) -> float:
    """Bytes per draft token: by the tree's own count if it has one, else by the process's size."""
    contender = peer()
    batch = [LiveRequest(recorded) for recorded in requests * max(1, 64 // len(requests))]
    process = psutil.Process()
    before = process.memory_info().rss
    for live in batch:
        contender.open(live)
    if isinstance(contender, Arctic):
        used = sum(tree.estimate_memory() for tree in contender.trees.values())
    else:
        used = process.memory_info().rss - before
    return used / sum(_draft_tokens(live.recorded) for live in batch)


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
