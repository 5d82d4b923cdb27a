"""Two ranks under load: aborts, retractions, and a sidecar that stops and dies, in 100 requests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.server import ServerError
from benchmark.harness.speculation import wait_for_sidecar
from test.engine.awaiting import awaiting
from test.engine.server.running import GREEDY, sidecar_process, state, until
from test.preloaded.server import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.thorough,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
]

ARGUMENTS = [
    *("--device", "cpu", "--dtype", "float32", "--log-level", "warning", "--tp-size", "2"),
    # The KV slots are too few for four answers: SGLang retracts some requests.
    *("--max-running-requests", "4", "--max-total-tokens", "448", "--context-length", "256"),
]
ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
"""SGLang expects at most 16 more tokens of a request, so it admits more than the slots hold."""
WORDS = ["sea", "calm", "boats", "went", "out", "list", "months", "year", "capital", "Norway"]
ABORTED = range(0, 100, 9)
"""Numbers of the requests that the test aborts."""


@pytest.fixture(scope="module")
def server(small_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    qspec = (
        "--speculative-algorithm",
        "QSPEC",
        "--speculative-draft-model-path",
        str(small_target),
    )
    environment = awaiting(tmp_path_factory.mktemp("plugin")) | ENVIRONMENT
    with Server(small_target, [*ARGUMENTS, *qspec], environment=environment) as running:
        wait_for_sidecar(running)
        yield running


def body(number: int, **custom: Any) -> dict[str, Any]:
    """Request `number`, one of 100 different ones; every third is sampled with a seed."""
    text = " ".join(random.Random(number).choices(WORDS, k=12))
    varied: dict[str, Any] = {**GREEDY, "max_new_tokens": 100, "frequency_penalty": 1.5}
    if number % 3 == 0:
        varied |= {"temperature": 1.0, "sampling_seed": number}
    return {"text": text, "sampling_params": {**varied, "custom_params": custom}}


def test_100_requests_get_the_answers_of_two_ranks_without_speculation(server: Server) -> None:
    def plain(number: int) -> list[int]:
        answer = server.post("/generate", body(number, qspec_enabled=False))
        found: list[int] = answer["output_ids"]
        return found

    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(plain, range(100)))

    def ask(number: int) -> dict[str, Any] | None:
        rid = f"request-{number}"
        if number == 30:
            sidecar_process(server).send_signal(signal.SIGSTOP)
        if number == 50:
            sidecar_process(server).kill()
        if number not in ABORTED:
            found: dict[str, Any] = server.post("/generate", {**body(number), "rid": rid})
            return found
        with contextlib.suppress(ServerError):
            for chunk, _ in enumerate(
                server.stream("/generate", {**body(number), "rid": rid, "stream": True})
            ):
                if chunk == 2:
                    server.post("/abort_request", {"rid": rid})
        return None

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(100)))
    complete = {number: answer for number, answer in enumerate(answers) if answer is not None}
    assert len(complete) == 100 - len(ABORTED)
    changed = [n for n, answer in complete.items() if answer["output_ids"] != expected[n]]
    assert not changed
    assert any(answer["meta_info"]["num_retractions"] for answer in complete.values())
    assert sum(answer["meta_info"]["qspec"]["accepted_tokens"] for answer in complete.values()) > 0
    until(lambda: state(server)["live_requests"] == 0)
    assert not state(server)["failed"], server.log[-4000:]
    wait_for_sidecar(server)
