"""Sidecar processes that are stopped, killed, replaced or send wrong messages, under load.

The server runs in float32 and the requests are greedy. `server/test_sidecar` tests how a server
restarts its own sidecar.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from benchmark.harness.server import Server
from sglang_qspec.config import MODES
from test.engine.external.conftest import SLOTS
from test.engine.external.sidecars import Sidecars
from test.engine.server.running import of_sidecar, state, turn, until

pytestmark = pytest.mark.server

MAX_NEW_TOKENS = 24
GREEDY = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
PLAINLY = {**GREEDY, "custom_params": {"qspec_enabled": False}}


@pytest.fixture(scope="module", autouse=True)
def settings(server: Server) -> None:
    """Restore the settings of the start, because other modules of this folder change them."""
    turn(server, mode=MODES.index("auto"), fixed_width=0, step_tokens=16)


@pytest.fixture(scope="module")
def prompts(prompts: list[str]) -> list[str]:
    return prompts[:8]


@pytest.fixture(scope="module")
def expected(server: Server, prompts: list[str]) -> list[list[int]]:
    """Output ids of plain decoding, with all prompts in one call."""
    answers = server.post("/generate", {"text": prompts, "sampling_params": PLAINLY})
    assert not any("qspec" in answer["meta_info"] for answer in answers)
    return [answer["output_ids"] for answer in answers]


def from_sidecar(server: Server) -> int:
    """Number of output tokens so far that a sidecar drafted."""
    return of_sidecar(state(server)["accepted_tokens"])


class Load:
    """Clients that send requests one after the other, until `going` is False."""

    def __init__(self, server: Server, prompts: Sequence[str], pool: ThreadPoolExecutor) -> None:
        self.going = True
        self._server = server
        self._prompts = prompts
        self._clients: list[Future[list[tuple[int, list[int]]]]] = [
            pool.submit(self._client, number) for number in range(2 * SLOTS)
        ]

    def _client(self, number: int) -> list[tuple[int, list[int]]]:
        answers: list[tuple[int, list[int]]] = []
        while self.going or not answers:
            index = number % len(self._prompts)
            number += 3
            body = {"text": self._prompts[index], "sampling_params": GREEDY}
            answers.append((index, self._server.post("/generate", body)["output_ids"]))
        return answers

    def answers(self) -> list[tuple[int, list[int]]]:
        """Number of the prompt and output ids of each answer. Raises the error of a client."""
        self.going = False
        return [answer for client in self._clients for answer in client.result()]


@contextmanager
def loaded(server: Server, prompts: Sequence[str], expected: list[list[int]]) -> Iterator[None]:
    """A context under load. At its end every request must have the target's tokens."""
    with ThreadPoolExecutor(2 * SLOTS) as pool:
        load = Load(server, prompts, pool)
        try:
            yield
        finally:
            load.going = False
        answers = load.answers()
    assert all(output_ids == expected[index] for index, output_ids in answers)
    assert state(server)["live_requests"] == 0


def drafts_are_accepted(server: Server) -> None:
    before = from_sidecar(server)
    until(lambda: from_sidecar(server) > before + 50)


def test_stopping_resuming_and_killing_a_sidecar_changes_no_output(
    server: Server, sidecars: Sidecars, prompts: list[str], expected: list[list[int]]
) -> None:
    until(lambda: state(server)["sidecar"] == "ready")
    rng = random.Random(11)
    with loaded(server, prompts, expected):
        drafts_are_accepted(server)
        for longest in (0.1, 0.5, 4.5):  # after 3 s of silence it is lost
            time.sleep(rng.uniform(0.0, 0.5))
            sidecars.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.8, 1.0) * longest)
            sidecars.signal(signal.SIGCONT)
        until(lambda: state(server)["sidecar"] == "ready")
        drafts_are_accepted(server)
        time.sleep(rng.uniform(0.0, 0.5))
        sidecars.kill()
        until(lambda: state(server)["sidecar"] == "lost")


def test_a_slow_sidecar_that_sends_wrong_messages_changes_no_output(
    server: Server, sidecars: Sidecars, prompts: list[str], expected: list[list[int]]
) -> None:
    sidecars.close()
    before = state(server)
    sidecars.start_lying(seed=5)
    with loaded(server, prompts, expected):
        until(lambda: state(server)["sidecar"] == "ready")
        for mode in MODES.index("sequential"), MODES.index("halves"), MODES.index("auto"):
            assert all(server.post("/set_internal_state", {"server_args": {"qspec_mode": mode}}))
            wrong_messages_arrive(server)
        sidecars.signal(signal.SIGSTOP)
        time.sleep(0.3)
        sidecars.signal(signal.SIGCONT)
    after = state(server)
    refused, proposed = after["refused_chunks"], after["proposed_tokens"]
    for reason in ("ahead", "gap"):
        assert refused[reason] > before["refused_chunks"][reason]
    assert proposed["step"] > before["proposed_tokens"]["step"]


def wrong_messages_arrive(server: Server) -> None:
    before = malformed(server)
    until(lambda: malformed(server) > before + 100)


def malformed(server: Server) -> int:
    return int(state(server)["dropped_messages"]["malformed"])


def test_drafts_of_the_next_honest_sidecar_are_accepted(
    server: Server, sidecars: Sidecars, prompts: list[str], expected: list[list[int]]
) -> None:
    sidecars.close()
    sidecars.start()
    with loaded(server, prompts, expected):
        until(lambda: state(server)["sidecar"] == "ready")
        drafts_are_accepted(server)
