"""Clients that keep a server busy, while the tests disturb its sidecars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from benchmark.harness.server import Server
from test.engine.server.running import of_sidecar, state, until

SLOTS = 4
"""Maximum number of running requests."""
MAX_NEW_TOKENS = 24
GREEDY = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
PLAINLY = {**GREEDY, "custom_params": {"qspec_enabled": False}}


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
