"""Serves a cell: warms the server up, flushes its cache, sends requests, and reads the counters."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from benchmark.harness.others import Others
from benchmark.harness.run import Answer, Run
from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import await_work, settled_counters

SLOWEST_TOKENS_PER_S = 1.0
"""Time limits assume at least this number of tokens per second; a slower server counts as hung."""
WARM_UP_TOKENS = 16

Prompt = TypeVar("Prompt")
Raw = Mapping[str, Any]
"""The answer of /generate to one prompt, or that of a peer with `output_ids` alone."""


@dataclass(frozen=True)
class Sent:
    """The answers to the requests of a cell, in the order of the prompts."""

    raw: Sequence[Raw]
    latencies: Sequence[float] | None = None
    """Seconds from each arrival to its answer; None if the server's latencies count."""
    retried: int = 0
    """Requests that were answered at the second attempt."""


def serve(
    server: Server,
    send: Callable[[], Sent],
    warm_up: Callable[[], object],
    *,
    has_sidecar: bool,
    await_sidecar: bool = True,
    flush: bool = True,
    idle: float = 0.0,
) -> Run:
    """Measure `send` on a warm server; `flush` empties its cache first.

    `await_sidecar` repeats the warm-up until the sidecar works. The server then idles for `idle`
    seconds. Raises ServerError, OSError, or RuntimeError if the sidecar does nothing or does not
    stop drafting.
    """
    if has_sidecar and await_sidecar:
        await_work(server, warm_up)
    else:
        warm_up()
    if flush:
        server.post("/flush_cache?timeout=10", {})
    before = settled_counters(server) if has_sidecar else None
    time.sleep(idle)
    began, others = time.monotonic(), Others(server)
    sent = send()
    seconds, share = time.monotonic() - began, others.share()
    counters = None if before is None else settled_counters(server).since(before)
    latencies = sent.latencies or [raw["meta_info"]["e2e_latency"] for raw in sent.raw]
    answers = tuple(map(read_answer, sent.raw, latencies))
    prefill = prefill_seconds(sent.raw)
    return Run(seconds, answers, share, prefill, counters, sent.retried)


def warm_up(server: Server, requests: int, sampling: Mapping[str, Any]) -> None:
    """Send short requests, so that the measurement includes no first use and no wake-up."""
    short = {**sampling, "max_new_tokens": WARM_UP_TOKENS}
    prompts = [f"Chapter {number}." for number in range(requests)]
    server.post("/generate", {"text": prompts, "sampling_params": short})


def send_batch(server: Server, body: Mapping[str, Any], tokens: int) -> Sent:
    """Send all prompts of `body` in one request; `tokens` bounds the sum of output tokens."""
    timeout = 120.0 + tokens / SLOWEST_TOKENS_PER_S
    return Sent(list(map(checked, server.post("/generate", dict(body), timeout))))


def send_each(
    server: Server,
    prompts: Sequence[str],
    sampling: Mapping[str, Any],
    arrivals: Sequence[float] | None = None,
    title: str | None = None,
) -> Sent:
    """Send each prompt in a request of its own, and a request that fails once more.

    `arrivals` are seconds from the start, None sends all requests at once. `title` shows a progress
    bar. Raises ServerError or OSError if the second attempt fails too.
    """
    began = time.monotonic()
    arrivals = arrivals or [0.0] * len(prompts)
    # A request may have to wait for all others.
    tokens = len(prompts) * sampling["max_new_tokens"]
    timeout = 120.0 + arrivals[-1] + tokens / SLOWEST_TOKENS_PER_S

    def ask(prompt: str) -> Raw:
        body = {"text": prompt, "sampling_params": dict(sampling)}
        return checked(server.post("/generate", body, timeout))

    def served(prompt: str, after: float) -> tuple[Raw, float, bool]:
        arrival, retried = began + after, False
        time.sleep(max(0.0, arrival - time.monotonic()))
        try:
            answer = ask(prompt)
        except (ServerError, OSError):
            answer, retried = ask(prompt), True
        return answer, time.monotonic() - arrival, retried

    pool = ThreadPoolExecutor(len(prompts))
    try:
        pending = [pool.submit(served, *each) for each in zip(prompts, arrivals, strict=True)]
        done = as_completed(pending)
        for future in tqdm(done, title, len(pending), file=sys.stderr, disable=title is None):
            future.result()
    finally:
        # After an error or an interrupt the benchmark stops the server, which ends what waits.
        pool.shutdown(wait=False, cancel_futures=True)
    answers, latencies, retried = zip(*(future.result() for future in pending), strict=True)
    return Sent(answers, latencies, retried=sum(retried))


def keep_in_flight(
    in_flight: int,
    ask: Callable[[Prompt, int], Raw],
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
) -> Sent:
    """Keep `in_flight` requests at a server until all prompts have their answers.

    `ask` gets the answer to a prompt, of a length in tokens. Raises what `ask` raises.
    """

    def timed(prompt: Prompt, length: int) -> tuple[Raw, float]:
        began = time.monotonic()
        found = ask(prompt, length)
        return found, time.monotonic() - began

    with ThreadPoolExecutor(in_flight) as pool:
        answers, latencies = zip(*pool.map(timed, prompts, lengths), strict=True)
        return Sent(answers, latencies)


def checked(raw: Raw) -> Raw:
    """Returns the answer. Raises ServerError if the server aborted the request."""
    reason = raw["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise ServerError(f"the server aborted a request: {reason.get('message')}")
    return raw


def read_answer(raw: Raw, latency: float) -> Answer:
    """The answer to one prompt, `latency` seconds after its arrival; a peer has no queue time."""
    meta = raw["meta_info"]
    output_ids = tuple(raw["output_ids"])
    passes, proposed = max(len(output_ids) - 1, 0), 0
    accepted: dict[str, int] = {}
    # With QSPEC SGLang fills in `spec_verify_ct` too, but QSPEC's own record counts.
    if "qspec" in meta:
        record = meta["qspec"]
        passes, proposed = record["passes"], record["proposed_tokens"]
        accepted = dict(record["accepted_by_source"])
    elif "spec_verify_ct" in meta:
        passes, proposed = meta["spec_verify_ct"], meta["spec_num_proposed_drafts"]
        accepted = {"ngram": meta["spec_num_correct_drafts"]}
    service = meta.get("e2e_latency", latency) - meta.get("queue_time", 0.0)
    return Answer(output_ids, latency, service, passes, proposed, accepted)


def prefill_seconds(answers: Sequence[Raw]) -> float:
    """Seconds in which the target prefilled at least one prompt; it decodes nothing then."""
    metas = [raw["meta_info"] for raw in answers if "forward_entry_time" in raw["meta_info"]]
    spans = sorted((meta["forward_entry_time"], meta["prefill_finished_time"]) for meta in metas)
    total, reached = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
