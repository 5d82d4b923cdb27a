"""Compares decode steps without drafts on a server with QSPEC and on one without speculation.

Both servers are ready at once and serve in turn. An answer of many tokens takes longer than one of
few tokens by the time of the steps between them, so the time of the prefill drops out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmark.gpu_check import dummy
from benchmark.gpu_check.findings import Options, Steps
from benchmark.gpu_check.serving import settings
from benchmark.gpu_check.times import DUMMY, PROMPT_IDS, PROMPT_TOKENS, models
from benchmark.harness.configuration import Configuration
from benchmark.harness.report import Table, fields
from benchmark.harness.server import Server

BATCHES = (1, 8, 32, 64)
ROUNDS = 3
TOKENS = (24, 120)
"""Lengths of the shorter and the longer answers."""
OFF = {"custom_params": {"qspec_enabled": False}}
KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
}


def plain_times(options: Options, steps: Steps) -> None:
    """Measure the decode steps of an 8B shape with dummy weights, by number of requests."""
    batches = (1, 2) if options.emulated else BATCHES
    tokens = (2, 6) if options.emulated else TOKENS
    slots = max(batches)
    kv = 2 * slots * (PROMPT_TOKENS + max(tokens))
    with models(options) as (folder, shapes), ExitStack() as stack:
        model = dummy.write(folder, shapes[0])
        shared = settings(options, model, model, "bfloat16", slots, 2048)
        # The second server finds the memory that the first one has left.
        memory = ("--mem-fraction-static", "0.85") if options.on_gpu else ()
        flags = (*DUMMY, "--max-total-tokens", str(kv), *memory)
        ours = ("--speculative-algorithm", "QSPEC", *flags)
        servers = [
            stack.enter_context(Configuration(name, shared, own, shared.target_cores).server())
            for name, own in (("no speculation", flags), ("QSPEC", ours))
        ]
        rows = measure(servers, batches, tokens)
    steps.found.figures["rows"] = rows
    columns = fields("kind", "requests", "plain_ms", "qspec_ms", "ratio")
    note = f"Medians of {ROUNDS} rounds; the ratio is the time without QSPEC over the time with it."
    steps.found.tables.append(Table.of("Decode steps without drafts, in ms", rows, columns, note))


def measure(
    servers: Sequence[Server], batches: Sequence[int], tokens: tuple[int, int]
) -> list[dict[str, Any]]:
    """The times of a step of each server, and the median ratio, by kind and number of requests."""
    for server in servers:  # the first passes of a server compile kernels
        step_ms(server, max(batches), {**KINDS["greedy"], **OFF}, tokens)
    found: dict[tuple[str, int], list[list[float]]] = {}
    for _ in range(ROUNDS):
        for kind, params in KINDS.items():
            for batch in batches:
                taken = [step_ms(server, batch, {**params, **OFF}, tokens) for server in servers]
                found.setdefault((kind, batch), []).append(taken)
    return [
        {
            "kind": kind,
            "requests": batch,
            "plain_ms": round(median(plain for plain, _ in taken), 3),
            "qspec_ms": round(median(qspec for _, qspec in taken), 3),
            "ratio": round(median(plain / qspec for plain, qspec in taken), 3),
        }
        for (kind, batch), taken in found.items()
    ]


def step_ms(
    server: Server, batch: int, params: Mapping[str, Any], tokens: tuple[int, int]
) -> float:
    """The milliseconds of one decode step over `batch` requests."""
    seconds = []
    for length in tokens:
        rng = random.Random(f"{batch} {length}")
        texts = [rng.choices(PROMPT_IDS, k=PROMPT_TOKENS) for _ in range(batch)]
        asked = {"ignore_eos": True, "max_new_tokens": length, **params}
        began = time.perf_counter()
        server.post("/generate", {"input_ids": texts, "sampling_params": asked})
        seconds.append(time.perf_counter() - began)
    return 1e3 * (seconds[1] - seconds[0]) / (tokens[1] - tokens[0])
