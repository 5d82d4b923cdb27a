"""Helpers that ask a running server. `conftest` starts the server of this folder."""

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from benchmark.harness.server import Server

MAX_NEW_TOKENS = 48

GREEDY = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
PENALIZED: list[dict[str, Any]] = [
    {**GREEDY, "frequency_penalty": 0.6},
    {**GREEDY, "presence_penalty": 0.9},
    {**GREEDY, "repetition_penalty": 1.2},
    {**GREEDY, "repetition_penalty": 0.8, "min_new_tokens": MAX_NEW_TOKENS},
    GREEDY,
]

COMMON = [
    *("--device", "cpu", "--dtype", "float32", "--max-running-requests", "2"),
    *("--max-total-tokens", "16384", "--context-length", "2048", "--log-level", "warning"),
    "--sleep-on-idle",  # otherwise an idle server takes a core from the server under test
]
QSPEC = ("--speculative-algorithm", "QSPEC", "--speculative-qspec-mem-fraction", "0.08")
"""QSPEC with a small sidecar: those of several tests run at once, and share the memory."""


def cores(index: int) -> tuple[int, ...]:
    """One core for the target (0), another for the sidecar (1), if there are two."""
    available = sorted(os.sched_getaffinity(0))
    return (available[index % len(available)],)


def until(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    """Wait until the condition is true. Only a broken build reaches the limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


def state(server: Server) -> dict[str, Any]:
    """QSPEC's part of /server_info."""
    internal: dict[str, Any] = server.get("/server_info")["internal_states"][0]["qspec"]
    return internal


def turn(server: Server, **runtime: int) -> None:
    """Change settings of the running server, named without their prefix `qspec_`."""
    values = {f"qspec_{name}": value for name, value in runtime.items()}
    assert server.post("/set_internal_state", {"server_args": values}) == [True]


def generate(server: Server, text: str, **sampling: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(
        "/generate", {"text": text, "sampling_params": {**GREEDY, **sampling}}
    )
    return answer


def all_at_once(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda text: generate(server, text), prompts))


def sidecar_processes(server: Server) -> list[psutil.Process]:
    """The server's own sidecar processes, at most one."""
    found = []
    for process in server.processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process may end meanwhile
            if "sglang_qspec.sidecar" in process.cmdline():
                found.append(process)
    return found


def sidecar_process(server: Server) -> psutil.Process:
    (process,) = sidecar_processes(server)
    return process


def of_sidecar(by_source: dict[str, int]) -> int:
    """Tokens that the sidecar drafted, before or while a request was served."""
    return by_source["queue"] + by_source["step"]


def tagged(text: str, guess: str) -> str:
    """The prompt with a tagged guess in its middle."""
    return text[:30] + f"<NGRAMGUESS>{guess}</NGRAMGUESS>" + text[30:]


@dataclass(frozen=True)
class Plain:
    """The answers of a server without speculation."""

    greedy: list[dict[str, Any]]
    penalized: list[dict[str, Any]]
    sampled: list[dict[str, Any]]
