"""Requests that end early leave nothing behind on a running server."""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmark.harness.server import Server, ServerError
from test.engine.contract import leaves_nothing_behind, used_tokens
from test.engine.server.running import GREEDY, generate

pytestmark = pytest.mark.server


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
    leaves_nothing_behind(server)
    assert generate(server, prompts[0], max_new_tokens=4)["meta_info"]["completion_tokens"] == 4
