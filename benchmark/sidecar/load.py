"""Loads of `bench_sidecar`: many live requests at once, and greedy servers beside a light one."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from typing import Any

from benchmark.sidecar.stopwatch import Stopwatch
from sglang_qspec.link import Peer
from sglang_qspec.messages import Close, Drafted, SeededSampling, Submit
from sglang_qspec.sidecar import pass_runner
from sglang_qspec.sidecar.drafter import Drafter

SUBMITS = 200
"""Number of timed submissions; the load closes each of them."""
PASSES = 30
"""Number of timed passes."""
COMPLETIONS = 8
GREEDY_PROMPTS = 32
"""Prompts that each greedy server keeps in the queue."""


def submissions(
    model: Any, live: int, *, one_prompt: bool, size: int, tokens: int
) -> dict[str, Any]:
    """Submissions per second, and milliseconds of bookkeeping in a pass, with `live` requests.

    `size` and `tokens` are the lengths of a prompt and of a completion, in tokens.
    """
    drafter = Drafter(model, max_completion_tokens=tokens, apart=True)
    peer, numbers = Peer("bench", b""), itertools.count(1)

    def submit() -> int:
        number = next(numbers)
        # Different prompts differ from their first token on.
        first = 0 if one_prompt else number
        token_ids = [1000 + (first * 31 + place * 7) % 40_000 for place in range(size)]
        seeded = SeededSampling(number, 1.0)
        asked = Submit(number, token_ids, 0, tokens, COMPLETIONS, 0.6, seeded=seeded)
        drafter.submit(peer, asked)
        drafter.take()
        return number

    for _ in range(live):
        submit()
    bookkeeping = []
    passes = Stopwatch()
    with passes.on(model, "step", "extend"), passes.on(pass_runner, "choose_shared"):
        for _ in range(PASSES):
            began = time.perf_counter()
            passes.reset()
            drafter.step()
            drafter.take()
            bookkeeping.append(time.perf_counter() - began - passes.seconds)
            if drafter.idle:
                break
    began = time.perf_counter()
    for _ in range(SUBMITS):
        drafter.close(peer, Close(submit()))
    seconds = time.perf_counter() - began
    drafter.drop(peer)
    drafter.check_integrity()
    return {
        "live": live,
        "prompts": "one" if one_prompt else "different",
        "submits_per_s": SUBMITS / seconds,
        "bookkeeping_ms": statistics.median(bookkeeping) * 1e3,
    }


def fair_share(
    model: Any, servers: int, *, size: int, tokens: int, requests: int
) -> dict[str, Any]:
    """The slowdown of the light server's requests with `servers` servers instead of one.

    If each server gets a fair share of the drafter, the slowdown is at most `servers`, plus the
    pass that runs when a request comes.
    """
    alone = _light_seconds(model, 1, size, tokens, requests)
    shared = _light_seconds(model, servers, size, tokens, requests)
    return {"servers": servers, "light_ms": shared * 1e3, "slowdown": shared / alone}


def _light_seconds(model: Any, servers: int, size: int, tokens: int, requests: int) -> float:
    """Mean seconds from the submission of a light request to its last draft token."""
    drafter = Drafter(model, max_completion_tokens=512, apart=model.device == "cpu")
    numbers, rng = itertools.count(1), random.Random(servers)
    light, greedy = Peer("light", b"l"), [Peer(f"g{n}", bytes([n])) for n in range(servers - 1)]

    def submit(peer: Peer, completions: int, max_new_tokens: int) -> int:
        number = next(numbers)
        token_ids = rng.choices(range(1000, 40_000), k=size)
        asked = Submit(number, token_ids, 0, max_new_tokens, completions, 0.6, ignore_eos=True)
        drafter.submit(peer, asked)
        return number

    for peer in greedy:
        for _ in range(GREEDY_PROMPTS):
            submit(peer, 8, 512)
    for _ in range(50 if greedy else 0):
        drafter.step()
    began = time.perf_counter()
    for _ in range(requests):
        number, drafted = submit(light, 1, tokens), 0
        while drafted < tokens:
            drafter.step()
            for peer, message in drafter.take():
                if peer == light and isinstance(message, Drafted):
                    drafted += len(message.token_ids)
        drafter.close(light, Close(number))
    seconds = (time.perf_counter() - began) / requests
    for peer in (light, *greedy):
        drafter.drop(peer)
    drafter.check_integrity()
    return seconds
