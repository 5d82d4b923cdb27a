"""Serving one cell: warm the server up, empty its cache, send the requests, count what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.harness.others import Others
from benchmark.harness.run import Answer, Gap, Run
from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import await_drafts, settled_counters

SLOWEST_TOKENS_PER_S = 1.0
"""A server that is slower than this has hung."""
WARM_UP_TOKENS = 16

Raw = Mapping[str, Any]
"""The answer of /generate to one prompt."""


@dataclass(frozen=True)
class Sent:
    """The answers to the requests of a cell, in the order of the prompts."""

    raw: Sequence[Raw]
    latencies: Sequence[float] | None = None
    """Seconds from each arrival to its answer; None for those that the server reports."""
    gaps: tuple[Gap, ...] = ()
    retried: int = 0


def serve(
    server: Server,
    send: Callable[[], Sent],
    warm_up: Callable[[], object],
    *,
    has_sidecar: bool,
    await_sidecar: bool = True,
    flush: bool = True,
) -> Run:
    """Measure `send` on a server that is warm and has an empty cache, unless `flush` is False.

    `await_sidecar` repeats the warm-up until the sidecar drafts. Raises ServerError, OSError, or
    RuntimeError if the sidecar does not draft or does not come to rest.
    """
    if has_sidecar and await_sidecar:
        await_drafts(server, warm_up)
    else:
        warm_up()
    if flush:
        server.post("/flush_cache?timeout=10", {})
    before = settled_counters(server) if has_sidecar else None
    began, others = time.monotonic(), Others(server)
    sent = send()
    seconds, share = time.monotonic() - began, others.share()
    counters = None if before is None else settled_counters(server).since(before)
    latencies = sent.latencies or [raw["meta_info"]["e2e_latency"] for raw in sent.raw]
    answers = tuple(map(read_answer, sent.raw, latencies))
    prefill = prefill_seconds(sent.raw)
    return Run(seconds, answers, share, prefill, counters, sent.gaps, sent.retried)


def warm_up(server: Server, requests: int, sampling: Mapping[str, Any]) -> None:
    """Fill every slot and a short queue, so that first uses and pauses are not measured."""
    short = {**sampling, "max_new_tokens": WARM_UP_TOKENS}
    prompts = [f"Chapter {number}." for number in range(requests)]
    server.post("/generate", {"text": prompts, "sampling_params": short})


def send_batch(server: Server, body: Mapping[str, Any], tokens: int) -> Sent:
    """Send all prompts of `body` at once; `tokens` is the most that all answers have together."""
    timeout = 120.0 + tokens / SLOWEST_TOKENS_PER_S
    if body.get("stream"):
        return read_stream(server, body, timeout)
    return Sent(list(map(checked, server.post("/generate", dict(body), timeout))))


def read_stream(server: Server, body: Mapping[str, Any], timeout: float) -> Sent:
    """The last piece of each answer, which holds all of its tokens, and the gaps between pieces."""
    last: dict[int, Raw] = {}
    came: dict[int, float] = {}
    gaps = []
    for piece in server.stream("/generate", dict(body), timeout):
        now = time.monotonic()
        index = piece.get("index", 0)
        if index in last:
            known = last[index]["meta_info"]["completion_tokens"]
            fresh = piece["meta_info"]["completion_tokens"] - known
            # The last piece may only say that the answer has ended.
            if fresh:
                gaps.append(Gap(now - came[index], fresh))
        came[index], last[index] = now, piece
    return Sent([checked(last[index]) for index in sorted(last)], gaps=tuple(gaps))


def checked(raw: Raw) -> Raw:
    """The answer itself. Raises ServerError if the server aborted the request."""
    reason = raw["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ServerError(f"the server aborted a request: {reason.get('message')}")
    return raw


def read_answer(raw: Raw, latency: float) -> Answer:
    """The answer of /generate to one prompt, `latency` seconds after its arrival."""
    meta = raw["meta_info"]
    output_ids = tuple(raw["output_ids"])
    passes, proposed = max(len(output_ids) - 1, 0), 0
    accepted: dict[str, int] = {}
    # SGLang fills in `spec_verify_ct` with QSPEC too, where QSPEC's own record counts.
    if "qspec" in meta:
        record = meta["qspec"]
        passes, proposed = record["passes"], record["proposed_tokens"]
        accepted = dict(record["accepted_by_source"])
    elif "spec_verify_ct" in meta:
        passes, proposed = meta["spec_verify_ct"], meta["spec_num_proposed_drafts"]
        accepted = {"ngram": meta["spec_num_correct_drafts"]}
    service = meta["e2e_latency"] - meta["queue_time"]
    return Answer(output_ids, latency, service, passes, proposed, accepted)


def prefill_seconds(answers: Sequence[Raw]) -> float:
    """Seconds in which at least one prompt was read; SGLang decodes nothing meanwhile."""
    metas = [raw["meta_info"] for raw in answers if "forward_entry_time" in raw["meta_info"]]
    spans = sorted((meta["forward_entry_time"], meta["prefill_finished_time"]) for meta in metas)
    total, reached = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
