"""Clients that keep a server busy, while a test disturbs its sidecars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmark.harness.server import Server
from benchmark.harness.speculation import states_of
from test.engine.server.running import ask, of_sidecar, until

CLIENTS = 8
FEW = 10
"""Number of accepted draft tokens that show a sidecar at work."""
MAX_NEW_TOKENS = 24
"""Length of an answer, at most."""


def from_sidecar(server: Server) -> list[int]:
    """Number of output tokens so far that a sidecar drafted, of each scheduler."""
    return [of_sidecar(state["accepted_tokens"]) for state in states_of(server)]


class Load:
    """Clients that send requests one after the other, until `going` is False."""

    def __init__(
        self, server: Server, bodies: Sequence[dict[str, Any]], pool: ThreadPoolExecutor
    ) -> None:
        self.going = True
        self._server = server
        self._bodies = bodies
        self._clients: list[Future[list[tuple[int, list[int]]]]] = [
            pool.submit(self._client, number) for number in range(CLIENTS)
        ]

    def _client(self, number: int) -> list[tuple[int, list[int]]]:
        answers: list[tuple[int, list[int]]] = []
        while self.going or not answers:
            index = number % len(self._bodies)
            number += 3
            answer = ask(self._server, self._bodies[index], max_new_tokens=MAX_NEW_TOKENS)
            answers.append((index, answer["output_ids"]))
        return answers

    def answers(self) -> list[tuple[int, list[int]]]:
        """Number of the request and output ids of each answer. Raises the error of a client."""
        self.going = False
        return [answer for client in self._clients for answer in client.result()]


@contextmanager
def loaded(
    server: Server, bodies: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]
) -> Iterator[None]:
    """A context under load. At its end every request must have the target's tokens.

    `expected` are the answers to `bodies`, of any length.
    """
    with ThreadPoolExecutor(CLIENTS) as pool:
        load = Load(server, bodies, pool)
        try:
            yield
        finally:
            load.going = False
        answers = load.answers()
    for index, output_ids in answers:
        assert output_ids == expected[index]["output_ids"][:MAX_NEW_TOKENS]
    until(lambda: not any(state["live_requests"] for state in states_of(server)))


def drafts_are_accepted(server: Server) -> None:
    """Wait until each scheduler has accepted some more drafts of a sidecar.

    They are few, because a slow sidecar may need a minute for the drafts of one pass.
    """
    before = from_sidecar(server)
    until(
        lambda: all(new > old + FEW for new, old in zip(from_sidecar(server), before, strict=True))
    )
