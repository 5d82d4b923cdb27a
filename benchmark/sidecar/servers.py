"""What servers that want as much as they can get cost one that wants little.

One server has a single request after another, each with one completion. The others keep many
prompts with eight completions each in the queue, more than the drafter can ever do.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

PROMPTS = 32
"""Prompts that each greedy server keeps in the queue."""


def measure(model: Any, servers: int, *, size: int, tokens: int, requests: int) -> dict[str, Any]:
    """How many times as long the light server's requests take with `servers` as alone.

    A fair share of the drafter makes that at most `servers`, but for the pass that is under way
    when a request comes.
    """
    alone = _light_seconds(model, 1, size, tokens, requests)
    shared = _light_seconds(model, servers, size, tokens, requests)
    return {"servers": servers, "light_ms": shared * 1e3, "slowdown": shared / alone}


def _light_seconds(model: Any, servers: int, size: int, tokens: int, requests: int) -> float:
    """Seconds from a light request's submission to its completion, on average."""
    from sglang_qspec.link import Peer
    from sglang_qspec.messages import Close, Submit
    from sglang_qspec.sidecar.drafter import Drafter

    drafter = Drafter(model, max_completion_tokens=512, apart=model.device == "cpu")
    numbers, rng = itertools.count(1), random.Random(servers)
    light, greedy = Peer("light", b"l"), [Peer(f"g{n}", bytes([n])) for n in range(servers - 1)]

    def submit(peer: Peer, completions: int, max_new_tokens: int) -> int:
        number = next(numbers)
        token_ids = rng.choices(range(1000, 40_000), k=size)
        drafter.submit(
            peer,
            Submit(number, token_ids, 0, max_new_tokens, completions, 0.6, ignore_eos=True),
        )
        return number

    for peer in greedy:
        for _ in range(PROMPTS):
            submit(peer, 8, 512)
    for _ in range(50 if greedy else 0):
        drafter.step()
    began = time.perf_counter()
    for _ in range(requests):
        number, drafted = submit(light, 1, tokens), 0
        while drafted < tokens:
            drafter.step()
            drafted += sum(len(m.token_ids) for peer, m in drafter.take() if peer == light)
        drafter.close(light, Close(number))
    seconds = (time.perf_counter() - began) / requests
    for peer in (light, *greedy):
        drafter.drop(peer)
    drafter.check_integrity()
    return seconds
