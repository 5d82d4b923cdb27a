"""Requests that end early leave nothing behind on a running server."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmark.harness.server import Server, ServerError
from test.engine.awaiting import held
from test.engine.server.running import GREEDY, generate, state, until

pytestmark = pytest.mark.server


def test_an_aborted_request_leaves_nothing_behind(server: Server, prompts: list[str]) -> None:
    body = {
        "text": prompts[:6],
        "rid": [f"victim-{i}" for i in range(6)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
    }

    def ask() -> None:
        with contextlib.suppress(ServerError):
            server.post("/generate", body)

    asking = threading.Thread(target=ask)
    with held(server) as target:
        asking.start()
        until(lambda: state(server)["live_requests"] == 6)
        target.run(4)
        for rid in body["rid"]:
            server.post("/abort_request", {"rid": rid})
    asking.join()
    until(lambda: state(server)["live_requests"] == state(server)["trie_tokens"] == 0)
    until(lambda: state(server)["drafting_rows"] == 0)


def test_200_requests_with_random_aborts_leave_no_trie_no_draft_and_no_kv(
    server: Server, prompts: list[str]
) -> None:
    server.post("/flush_cache?timeout=60", {})
    assert used_tokens(server) == 0
    rng = random.Random(7)
    fates = [rng.choice(["finish", "abort", "hang up"]) for _ in range(200)]
    moments = [rng.uniform(0.05, 4.0) for _ in fates]

    def ask(number: int) -> None:
        """Send a request that finishes, is aborted by its rid, or is left by its client."""
        timeout = moments[number] if fates[number] == "hang up" else 120.0
        rid = f"fate-{number}"
        sampling = {**GREEDY, "max_new_tokens": 4 + number % 16, "ignore_eos": True}
        body = {"text": f"{number} is the number of", "rid": rid, "sampling_params": sampling}
        if fates[number] == "abort":
            threading.Timer(moments[number], server.post, ["/abort_request", {"rid": rid}]).start()
        with contextlib.suppress(ServerError, OSError):
            server.post("/generate", body, timeout=timeout)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(ask, range(200)))
    work = ("live_requests", "trie_tokens", "requests_in_flight")
    sidecars = ("drafting_requests", "drafting_rows")
    until(lambda: not any(state(server)[name] for name in (*work, *sidecars)))
    # Slots that the radix cache keeps are not in use; leaked ones would be, also after a flush.
    until(lambda: used_tokens(server) == 0)
    server.post("/flush_cache?timeout=60", {})
    assert used_tokens(server) == 0
    assert generate(server, prompts[0], max_new_tokens=4)["meta_info"]["completion_tokens"] == 4


def used_tokens(server: Server) -> int:
    """Number of KV slots that are neither free nor evictable from the radix cache."""
    (load,) = server.get("/v1/loads")["loads"]
    used: int = load["num_used_tokens"]
    return used
