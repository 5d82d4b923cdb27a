"""Measures the host's time for a decode pass without drafts, beside SGLang without speculation.

Both schedulers run in processes of their own with a target that takes no time (`stubbed`), and take
turns. The time is the CPU time of the scheduler's thread from one iteration to the next.
`python -m benchmark.overhead.host KIND REQUESTS` is one of these processes. It serves a batch for
each line of its standard input, and prints `host_ms` and the counts of `Device.counts` as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

TOKENS, ROUNDS = 128, 7
KINDS = ("stock", "qspec")


def compare(requests: int, environment: dict[str, str]) -> dict[str, Any]:
    """The record of both kinds, from batches of this number of requests in turns."""
    command = [sys.executable, "-m", "benchmark.overhead.host"]
    processes = [
        subprocess.Popen(
            [*command, kind, str(requests)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for kind in KINDS
    ]
    rounds = [[_ask(process) for process in processes] for _ in range(1 + ROUNDS)][1:]
    for process in processes:
        process.kill()
    found: dict[str, Any] = {
        kind: {
            "host_ms": statistics.median(each["host_ms"] for each in own),
            "waits_per_pass": sum(each["waits"] for each in own)
            / sum(each["passes"] for each in own),
            "idle_waits": sum(each["idle_waits"] for each in own),
        }
        for kind, own in zip(KINDS, zip(*rounds, strict=True), strict=True)
    }
    extra = [qspec["host_ms"] - stock["host_ms"] for stock, qspec in rounds]
    return {**found, "requests": requests, "extra_host_ms": statistics.median(extra)}


def _ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def main(kind: str, requests: int) -> None:
    from benchmark.overhead.stubbed import Stubbed, answer_of, model, prompt_of

    torch.set_num_threads(1)
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr  # SGLang may print
    os.dup2(2, 1)
    with model() as folder:
        stubbed = Stubbed(folder, qspec=kind == "qspec", requests=requests)
    if stubbed.worker is not None:
        stubbed.worker._runtime.draft_token_num = 1  # every round decides against drafts
    for _ in sys.stdin:
        stubbed.device.events.clear()
        reqs = [stubbed.add(prompt_of(n), max_new_tokens=TOKENS) for n in range(requests)]
        times = _serve(stubbed, reqs)
        for number, req in enumerate(reqs):
            assert list(req.output_ids_through_stop) == answer_of(prompt_of(number), TOKENS)
        out.write(
            json.dumps({"host_ms": statistics.median(times), **stubbed.device.counts()}) + "\n"
        )
        out.flush()


def _serve(stubbed: Any, reqs: Sequence[Any]) -> list[float]:
    """The host's time of each iteration that decodes, in ms."""
    times, scheduler = [], stubbed.scheduler
    began: int | None = None

    def each() -> bool:
        nonlocal began
        now, batch = time.thread_time_ns(), scheduler.last_batch
        if began is not None and batch is not None and batch.forward_mode.is_decode():
            times.append((now - began) / 1e6)
        began = time.thread_time_ns()
        return batch is not None or not all(req.finished() for req in reqs)

    stubbed.run(each)
    return times


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
