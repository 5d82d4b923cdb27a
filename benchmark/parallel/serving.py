"""Serving a cell: one configuration's prompts of a block, sent at once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness.others import Others
from benchmark.harness.server import Server, ServerError
from benchmark.parallel.counters import Counters, read_counters
from benchmark.parallel.plan import PIPELINES

WARM_UP_TOKENS = 16
HEARTBEAT_SECONDS = 1.3
"""After which the sidecar has told of all that it did."""
DRAFTING_SECONDS = 2.5
DRAFTING_LIMIT_SECONDS = 120.0
SLOWEST_TOKENS_PER_S = 1.0
"""A server that is slower has hung."""


@dataclass(frozen=True)
class Task:
    """What is to be served, and how."""

    config: str
    k: int
    running: int
    """Requests at once; the others wait in the server's queue."""
    prompts: Sequence[str]
    max_new_tokens: int
    streamed: bool = False

    def body(self, prompts: Sequence[str], max_new_tokens: int) -> dict[str, Any]:
        """A request for the greedy answers to all of the prompts, of that length exactly."""
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
        sampling["ignore_eos"] = True
        if self.config in PIPELINES and PIPELINES[self.config].sources:
            sampling["custom_params"] = {"qspec_sources": list(PIPELINES[self.config].sources)}
        return {"text": list(prompts), "sampling_params": sampling, "stream": self.streamed}


@dataclass(frozen=True)
class Served:
    """One request. Times are in seconds."""

    output: str
    """A digest of its tokens."""
    tokens: int
    latency: float
    """From its arrival, its time in the queue included."""
    service: float
    """From the end of its time in the queue."""
    passes: int
    """Target passes after the prompt's that it took part in."""


@dataclass(frozen=True)
class Gap:
    """Between two pieces of a streamed answer."""

    seconds: float
    tokens: int
    """Of the latter."""


@dataclass(frozen=True)
class CellRun:
    """What became of a task."""

    seconds: float
    """From the sending to the last answer."""
    prefill_seconds: float
    """In which prompts were read, and nothing was decoded."""
    requests: tuple[Served, ...]
    """In the order of the prompts."""
    counters: Counters | None
    """Of the cell alone; None without a sidecar."""
    others_share: float = 0.0
    """Of all processors, what went to anything but the server, its sidecar and the client."""
    gaps: tuple[Gap, ...] = ()
    """If it was streamed."""

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Without the prompts' passes, and without the token that each of them gives."""
        return (self.tokens - len(self.requests)) / (self.seconds - self.prefill_seconds)


def serve(server: Server, task: Task) -> CellRun:
    """Set the server up, warm it up, empty its cache, and serve.

    Raises ServerError, OSError, or RuntimeError if the sidecar does not draft.
    """
    speculating = task.config in PIPELINES
    turn(server, {"pp_max_micro_batch_size": task.running})
    if speculating:
        turn(server, PIPELINES[task.config].runtime(task.k))
        await_drafts(server, lambda: _warm_up(server, task))
    else:
        _warm_up(server, task)
    server.post("/flush_cache?timeout=10", {})
    before = _counters(server) if speculating else None
    began, others = time.monotonic(), Others(server)
    body = task.body(task.prompts, task.max_new_tokens)
    timeout = 120.0 + len(task.prompts) * task.max_new_tokens / SLOWEST_TOKENS_PER_S
    gaps: tuple[Gap, ...] = ()
    if task.streamed:
        answers, gaps = read_stream(server, body, timeout)
    else:
        answers = server.post("/generate", body, timeout)
    seconds, share = time.monotonic() - began, others.share()
    counters = None if before is None else _counters(server).since(before)
    requests = tuple(map(read_answer, answers))
    return CellRun(seconds, prefill_seconds(answers), requests, counters, share, gaps)


def read_stream(
    server: Server, body: Mapping[str, Any], timeout: float
) -> tuple[list[dict[str, Any]], tuple[Gap, ...]]:
    """The last piece of each answer, in the order of the prompts, and the gaps between pieces.

    Each piece holds all tokens of its answer so far.
    """
    last: dict[int, dict[str, Any]] = {}
    came: dict[int, float] = {}
    gaps = []
    for piece in server.stream("/generate", dict(body), timeout):
        now = time.monotonic()
        index = piece.get("index", 0)
        tokens = piece["meta_info"]["completion_tokens"]
        if index in last:
            fresh = tokens - last[index]["meta_info"]["completion_tokens"]
            # The last piece may only say that the answer has ended.
            if fresh:
                gaps.append(Gap(now - came[index], fresh))
        came[index] = now
        last[index] = piece
    return [last[index] for index in sorted(last)], tuple(gaps)


def read_answer(answer: Mapping[str, Any]) -> Served:
    """What /generate returned of one prompt. Raises ServerError if it was aborted."""
    meta = answer["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ServerError(f"the server aborted a request: {reason.get('message')}")
    ids = answer["output_ids"]
    return Served(
        output=hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16],
        tokens=len(ids),
        latency=meta["e2e_latency"],
        service=meta["e2e_latency"] - meta["queue_time"],
        passes=meta["qspec"]["passes"] if "qspec" in meta else max(len(ids) - 1, 0),
    )


def prefill_seconds(answers: Sequence[Mapping[str, Any]]) -> float:
    """Time in which at least one prompt was read; SGLang decodes nothing meanwhile."""
    spans = sorted(
        (answer["meta_info"]["forward_entry_time"], answer["meta_info"]["prefill_finished_time"])
        for answer in answers
    )
    total, reached = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def turn(server: Server, runtime: Mapping[str, int]) -> None:
    """Set a running server. Raises ServerError if it does not take it."""
    if server.post("/set_internal_state", {"server_args": dict(runtime)}) != [True]:
        raise ServerError(f"the server refused {dict(runtime)}")


def _warm_up(server: Server, task: Task) -> None:
    """Fill every slot and a short queue, so that neither a first use nor a pause is measured."""
    prompts = [f"Chapter {number}." for number in range(task.running + 2)]
    server.post("/generate", dict(task.body(prompts, WARM_UP_TOKENS), stream=False))


def await_drafts(server: Server, warm_up: Callable[[], None]) -> None:
    """Warm up until the sidecar drafts: after a pause either end may take the other for lost.

    Raises RuntimeError if it does not for long.
    """
    deadline = time.monotonic() + DRAFTING_LIMIT_SECONDS
    before = state_of(server)["drafted_tokens"]
    while time.monotonic() < deadline:
        warm_up()
        told = time.monotonic() + DRAFTING_SECONDS
        while time.monotonic() < told:
            # Not merely another: a new sidecar counts from 0.
            if state_of(server)["drafted_tokens"] > before:
                return
            time.sleep(0.25)
        before = min(before, state_of(server)["drafted_tokens"])
    raise RuntimeError(f"the sidecar has drafted nothing for {DRAFTING_LIMIT_SECONDS:g} s")


def _counters(server: Server) -> Counters:
    time.sleep(HEARTBEAT_SECONDS)
    return read_counters(state_of(server))


def state_of(server: Server) -> dict[str, Any]:
    """What QSPEC says of itself in /server_info."""
    state: dict[str, Any] = server.get("/server_info")["internal_states"][0]["qspec"]
    return state
