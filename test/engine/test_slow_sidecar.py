"""Two servers share a sidecar that is slower than both targets, so it becomes overloaded."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.messages import OverloadLevel
from sglang_qspec.tools.models import DemoModels
from test.engine.server.running import COMMON, GREEDY, state, until
from test.engine.test_several_servers import Sidecar, all_ready, flags, key_file
from test.preloaded.server import Server

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(900)]

CLIENTS = 16
"""Clients of each server. Most of their requests wait."""
PERIOD_S, SHARE, FALL = 0.2, 0.1, 0.98
"""The sidecar runs for this share of the first period, and for ever less of the next ones: it has
to become slower than any target."""

__all__ = ["key_file"]  # a fixture


@contextlib.contextmanager
def slowed(sidecar: Sidecar) -> Iterator[None]:
    """Stop the sidecar for most of the time."""
    ended = threading.Event()

    def stop_and_go() -> None:
        share = SHARE
        while not ended.is_set():
            sidecar.signal(signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            sidecar.signal(signal.SIGCONT)
            time.sleep(PERIOD_S * share)
            share *= FALL

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def ask(server: Server, text: str) -> list[int]:
    answer: dict[str, Any] = server.post("/generate", {"text": text, "sampling_params": GREEDY})
    ids: list[int] = answer["output_ids"]
    return ids


def test_an_overloaded_sidecar_declines_and_recovers_and_no_answer_changes(
    models: DemoModels,
    key_file: Path,
) -> None:
    prompts = render(models.target, PROMPTS)
    cores = sorted(os.sched_getaffinity(0))
    sidecar = Sidecar(models.draft, key_file, cores[-1], "--max-backlog", "0.5")
    arguments = [*COMMON, "--max-running-requests", "4", *flags([sidecar], key_file)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(sidecar.proxy)
        sidecar.start()
        stack.callback(sidecar.kill)
        servers = [
            stack.enter_context(Server(models.target, arguments, cores=cores[:1])) for _ in range(2)
        ]
        for server in servers:
            until(partial(all_ready, server))
        off = {**GREEDY, "custom_params": {"qspec_enabled": False}}
        plain = servers[0].post("/generate", {"text": prompts, "sampling_params": off})
        expected = {text: one["output_ids"] for text, one in zip(prompts, plain, strict=True)}
        going = True

        def client(number: int) -> int:
            count = 0
            while going:
                text = prompts[(number + count) % len(prompts)]
                assert ask(servers[number % 2], text) == expected[text], "a changed answer"
                count += 1
            return count

        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            try:
                clients = [pool.submit(client, number) for number in range(2 * CLIENTS)]
                with slowed(sidecar):
                    until(lambda: overload(servers) >= OverloadLevel.DECLINE)
                until(lambda: overload(servers) < OverloadLevel.DECLINE)
            finally:
                going = False
            assert sum(each.result() for each in clients) >= 2 * CLIENTS
        until(lambda: overload(servers) == OverloadLevel.NONE)
        for server in servers:
            described = state(server)
            assert described["live_requests"] == 0
            assert not described["failed"], server.log[-4000:]


def overload(servers: list[Server]) -> int:
    """The level that the servers have heard of."""
    return max(int(state(server)["sidecar_overload"]) for server in servers)
