"""Serving a block of prompts as one queue, and what became of its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from benchmark.harness.configuration import Configuration
from benchmark.harness.output import say
from benchmark.harness.server import Server, ServerError
from benchmark.queueing.load import Block, Load, arrival_times

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
class BlockRun:
    """One configuration's answers to one block, in the order of the prompts."""

    group: str
    part: int
    seconds: float
    """From the first arrival to the last answer."""
    answers: tuple[Answer, ...]
    drafted: int | None
    """Tokens that the sidecar drafted meanwhile; None without a sidecar."""
    retried: int = 0
    """Requests that were answered at the second attempt."""


def serve(server: Server, configuration: Configuration, block: Block, load: Load) -> BlockRun:
    """Warm the server up, empty its caches, and serve the block.

    A request that fails is sent a second time; raises ServerError or OSError if it fails again,
    and RuntimeError if the sidecar does not come to rest.
    """
    before = None
    if configuration.has_sidecar:
        _await_drafts(server, configuration)
        before = _drafted(server)
    else:
        _warm_up(server, configuration)
    server.post("/flush_cache?timeout=10", {})
    queue = Queue(server, configuration, block, load)
    seconds, answers = queue.serve()
    drafted = None if before is None else _drafted(server) - before
    return BlockRun(block.group, block.part, seconds, answers, drafted, queue.retried)


def _warm_up(server: Server, configuration: Configuration) -> None:
    """Fill every slot and a short queue, so that neither a first use nor a pause is measured."""
    sampling = {"temperature": 0, "max_new_tokens": 16}
    count = 2 * configuration.settings.slots
    bodies = [{"text": f"Chapter {n}.", "sampling_params": sampling} for n in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(server.post, "/generate", body) for body in bodies]:
            future.result()


def _await_drafts(server: Server, configuration: Configuration) -> None:
    """Warm up until the sidecar drafts: after a pause either end may take the other for lost."""
    deadline = time.monotonic() + SETTLE_LIMIT_SECONDS
    before = _count_drafted(server)
    while time.monotonic() < deadline:
        _warm_up(server, configuration)
        told = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < told:
            # Not merely another: a new sidecar counts from 0.
            if _count_drafted(server) > before:
                return
            time.sleep(0.25)
        before = min(before, _count_drafted(server))
    raise RuntimeError(f"the sidecar has drafted nothing for {SETTLE_LIMIT_SECONDS:g} s")


def _count_drafted(server: Server) -> int:
    count: int = server.get("/server_info")["internal_states"][0]["qspec"]["drafted_tokens"]
    return count


def _drafted(server: Server) -> int:
    """Tokens that the sidecar has drafted so far, once it has nothing left to draft."""
    deadline = time.monotonic() + SETTLE_LIMIT_SECONDS
    since, last = time.monotonic(), None
    while time.monotonic() < deadline:
        state = server.get("/server_info")["internal_states"][0]["qspec"]
        drafted: int = state["drafted_tokens"]
        if drafted != last or state["drafting_rows"]:
            since, last = time.monotonic(), drafted
        elif time.monotonic() - since >= SETTLE_SECONDS:
            return drafted
        time.sleep(0.25)
    raise RuntimeError(f"the sidecar still drafts {SETTLE_LIMIT_SECONDS:g} s after the last answer")


class Queue:
    """The requests of one block."""

    def __init__(
        self, server: Server, configuration: Configuration, block: Block, load: Load
    ) -> None:
        self.retried = 0
        self._server = server
        self._prompts = block.prompts
        self._arrivals = arrival_times(len(block.prompts), load.request_rate)
        self._label = f"{configuration.name}, {block.group}"
        self._sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": load.max_new_tokens}
        if configuration.custom_params:
            self._sampling["custom_params"] = dict(configuration.custom_params)
        # One token a pass at the slowest, and every request may have to wait for all others.
        most_tokens = len(block.prompts) * load.max_new_tokens
        self._timeout = 120.0 + self._arrivals[-1] + most_tokens / SLOWEST_TOKENS_PER_S
        self._lock = threading.Lock()

    def serve(self) -> tuple[float, tuple[Answer, ...]]:
        """Seconds from the first arrival to the last answer, and the answers."""
        started = time.monotonic()
        pool = ThreadPoolExecutor(len(self._prompts))
        try:
            pending = [
                pool.submit(self._answer, index, started + arrival)
                for index, arrival in enumerate(self._arrivals)
            ]
            for done, future in enumerate(as_completed(pending), 1):
                future.result()
                say(f"  {self._label}: {done}/{len(pending)}", end="\r")
            return time.monotonic() - started, tuple(future.result() for future in pending)
        finally:
            # After an error or an interrupt the server is stopped, which ends what still waits.
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, index: int, arrival: float) -> Answer:
        time.sleep(max(0.0, arrival - time.monotonic()))
        try:
            answer = self._ask(index)
        except (ServerError, OSError):
            answer = self._ask(index)
            with self._lock:
                self.retried += 1
        return read_answer(answer, time.monotonic() - arrival)

    def _ask(self, index: int) -> dict[str, Any]:
        body = {"text": self._prompts[index], "sampling_params": self._sampling}
        answer: dict[str, Any] = self._server.post("/generate", body, self._timeout)
        reason = answer["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise ServerError(f"the server aborted a request: {reason.get('message')}")
        return answer


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
