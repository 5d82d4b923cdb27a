"""Serving the prompts: one configuration at a time, group after group, each group as one queue."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmark.demo import say, wait_for_sidecar
from benchmark.queueing.configurations import Configuration
from benchmark.server import Server

SETTLE_SECONDS = 2.5
"""The sidecar tells about once a second what it has drafted."""
SETTLE_LIMIT_SECONDS = 120.0
SLOWEST_TOKENS_PER_S = 1.0
"""A server that is slower has hung."""


@dataclass(frozen=True)
class Answer:
    """What became of one request. Times are in seconds, counts in tokens."""

    output_ids: tuple[int, ...]
    latency: float
    """From the request's arrival, its time in the queue included."""
    service: float
    """From the end of its time in the queue."""
    passes: int
    """Target passes after the prompt's that the request took part in."""
    proposed: int
    accepted: Mapping[str, int]
    """Draft tokens by source."""

    @property
    def tokens(self) -> int:
        return len(self.output_ids)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted.values())

    @property
    def match_rate(self) -> float | None:
        """Share of the proposed draft tokens that were accepted; None if there were none."""
        return self.accepted_tokens / self.proposed if self.proposed else None


@dataclass(frozen=True)
class GroupRun:
    """One configuration's answers to one group, in the order of the prompts."""

    group: str
    seconds: float
    """From the first arrival to the last answer."""
    answers: tuple[Answer, ...]
    drafted: int | None
    """Tokens that the sidecar drafted meanwhile; None without a sidecar."""


@dataclass(frozen=True)
class Load:
    """What every configuration has to serve."""

    prompts: Mapping[str, Sequence[str]]
    """By group, in the model's chat template."""
    max_new_tokens: int
    request_rate: float
    """Arrivals per second; infinite for all at once."""


def serve(configuration: Configuration, load: Load, progress: str) -> list[GroupRun]:
    """Start the server, warm it up and serve all groups. `progress` starts each line on stderr.

    Raises ServerError, OSError or RuntimeError if the server does not start or stops answering.
    """
    say(f"{progress} starting")
    with configuration.server() as server:
        if configuration.has_sidecar:
            wait_for_sidecar(server)
        _warm_up(server, configuration.settings.slots)
        runs = []
        for group in load.prompts:
            before = _drafted(server) if configuration.has_sidecar else None
            server.post("/flush_cache?timeout=10", {})
            seconds, answers = _serve_group(server, group, load, progress)
            drafted = None if before is None else _drafted(server) - before
            runs.append(GroupRun(group, seconds, answers, drafted))
            tokens = sum(answer.tokens for answer in answers)
            say(f"{progress} {group}: {len(answers)} done, {tokens / seconds:.1f} tokens/s")
        return runs


def _warm_up(server: Server, slots: int) -> None:
    """Fill every slot once, so that no first use of a shape is measured."""
    body = {"text": "Hello", "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
    with ThreadPoolExecutor(slots) as pool:
        for future in [pool.submit(server.post, "/generate", body) for _ in range(slots)]:
            future.result()


def _drafted(server: Server) -> int:
    """Tokens that the sidecar has drafted so far, once it has nothing left to draft."""
    deadline = time.monotonic() + SETTLE_LIMIT_SECONDS
    since, last = time.monotonic(), -1
    while time.monotonic() < deadline:
        state = server.get("/server_info")["internal_states"][0]["qspec"]
        drafted: int = state["drafted_tokens"]
        if drafted != last or state["drafting_rows"]:
            since, last = time.monotonic(), drafted
        elif time.monotonic() - since >= SETTLE_SECONDS:
            return drafted
        time.sleep(0.25)
    raise RuntimeError(f"the sidecar still drafts {SETTLE_LIMIT_SECONDS:g} s after the last answer")


def _serve_group(
    server: Server, group: str, load: Load, progress: str
) -> tuple[float, tuple[Answer, ...]]:
    prompts = load.prompts[group]
    arrivals = arrival_times(len(prompts), load.request_rate)
    # One token a pass at the slowest, and every request may have to wait for all others.
    timeout = 120.0 + arrivals[-1] + len(prompts) * load.max_new_tokens / SLOWEST_TOKENS_PER_S
    sampling = {"temperature": 0, "max_new_tokens": load.max_new_tokens}
    started = time.monotonic()

    def ask(index: int) -> Answer:
        arrival = started + arrivals[index]
        time.sleep(max(0.0, arrival - time.monotonic()))
        body = {"text": prompts[index], "sampling_params": sampling}
        answer = server.post("/generate", body, timeout)
        return read_answer(answer, time.monotonic() - arrival)

    pool = ThreadPoolExecutor(len(prompts))
    try:
        pending = [pool.submit(ask, index) for index in range(len(prompts))]
        for done, future in enumerate(as_completed(pending), 1):
            future.result()
            say(f"{progress} {group}: {done}/{len(prompts)}", end="\r")
        seconds = time.monotonic() - started
        return seconds, tuple(future.result() for future in pending)
    finally:
        # After an error or an interrupt the server is stopped, which ends what still waits.
        pool.shutdown(wait=False, cancel_futures=True)


def arrival_times(count: int, rate: float) -> list[float]:
    """Seconds from the start to each arrival: a Poisson process of `rate` per second, repeatable.

    The first request arrives at once, and with an infinite rate all of them do.
    """
    # expovariate(inf) is 0.
    gaps = random.Random(0)
    return list(accumulate((gaps.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def read_answer(answer: Mapping[str, Any], latency: float) -> Answer:
    """What /generate returned, after `latency` seconds."""
    meta = answer["meta_info"]
    output_ids = tuple(answer["output_ids"])
    passes, proposed = max(len(output_ids) - 1, 0), 0
    accepted: dict[str, int] = {}
    if "qspec" in meta:
        record = meta["qspec"]
        passes, proposed = record["passes"], record["proposed_tokens"]
        accepted = dict(record["accepted_by_source"])
    elif "spec_verify_ct" in meta:
        passes, proposed = meta["spec_verify_ct"], meta["spec_num_proposed_drafts"]
        accepted = {"ngram": meta["spec_num_correct_drafts"]}
    service = meta["e2e_latency"] - meta["queue_time"]
    return Answer(output_ids, latency, service, passes, proposed, accepted)
