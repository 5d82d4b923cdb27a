"""Helpers that ask a running server. `conftest` starts the server of this folder."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from benchmark.harness.server import Server
from benchmark.harness.speculation import SIDECAR_MODULE, states_of

MAX_NEW_TOKENS = 48

GREEDY = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
PLAIN = {"custom_params": {"qspec_enabled": False}}
"""Sampling parameters of a request that is decoded without drafts."""
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
QSPEC = ("--speculative-algorithm", "QSPEC", "--speculative-qspec-mem-fraction", "0.05")
"""QSPEC with a small sidecar: those of several tests run at once, and share the memory."""


def cores(index: int) -> tuple[int, ...]:
    """One core for the target (0), another for the sidecar (1), if there are two.

    The workers of pytest-xdist begin with different cores, because target and sidecar of one server
    wait for each other much of the time.
    """
    available = sorted(os.sched_getaffinity(0))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return (available[(first + index) % len(available)],)


def until(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    """Wait until the condition is true. Only a broken build reaches the limit."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(pause)
        # A question costs a server some milliseconds, which the awaited event may need.
        pause = min(1.2 * pause, 0.15)


def state(server: Server) -> dict[str, Any]:
    """QSPEC's part of /server_info."""
    internal: dict[str, Any] = server.get("/server_info")["internal_states"][0]["qspec"]
    return internal


def connected(server: Server) -> None:
    """Wait until all schedulers are connected to their sidecars."""
    until(lambda: all(one["sidecar"] == "ready" for one in states_of(server)))


def turn(server: Server, **runtime: int) -> None:
    """Change settings of the running server, named without their prefix `qspec_`."""
    values = {f"qspec_{name}": value for name, value in runtime.items()}
    assert set(server.post("/set_internal_state", {"server_args": values})) == {True}


@contextlib.contextmanager
def turned(server: Server, **runtime: int) -> Iterator[None]:
    """A context with these runtime settings; the old ones are restored at its end."""
    before = state(server)["settings"]
    turn(server, **runtime)
    try:
        yield
    finally:
        turn(server, **{name: int(before[name]) for name in runtime})
    assert state(server)["settings"] == before


def ask(server: Server, body: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    """The answer to a request to /generate, which is greedy by default.

    Parameters of `sampling` replace those of the body.
    """
    params = {**GREEDY, **body.get("sampling_params", {}), **sampling}
    answer: dict[str, Any] = server.post("/generate", {**body, "sampling_params": params})
    return answer


def ask_all(
    server: Server, bodies: Sequence[dict[str, Any]], **sampling: Any
) -> list[dict[str, Any]]:
    """The answers to several requests, which are sent at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(server, body, **sampling), bodies))


def ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The output ids of answers."""
    return [answer["output_ids"] for answer in answers]


def generate(server: Server, text: str, **sampling: Any) -> dict[str, Any]:
    return ask(server, {"text": text}, **sampling)


def all_at_once(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    return ask_all(server, [{"text": text} for text in prompts])


def sidecar_processes(server: Server) -> list[psutil.Process]:
    """The server's own sidecar processes, at most one."""
    found = []
    for process in server.processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process may end meanwhile
            if SIDECAR_MODULE in " ".join(process.cmdline()):
                found.append(process)
    return found


def sidecar_process(server: Server) -> psutil.Process:
    (process,) = sidecar_processes(server)
    return process


def of_sidecar(by_source: dict[str, int]) -> int:
    """Tokens that the sidecar drafted, before or while a request was served."""
    return sum(by_source[source] for source in ("queue", "step", "head"))


def tagged(text: str, guess: str) -> str:
    """The prompt with a tagged guess in its middle."""
    return text[:30] + f"<NGRAMGUESS>{guess}</NGRAMGUESS>" + text[30:]


@dataclass(frozen=True)
class Plain:
    """The answers of a server without speculation."""

    greedy: list[dict[str, Any]]
    penalized: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    """Samples with `frequencies.SAMPLED`."""
