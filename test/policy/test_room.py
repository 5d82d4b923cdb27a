"""Lines make room while others have requests at a server, and come back afterwards."""

from __future__ import annotations

import random
from collections import deque

import pytest

from sglang_qspec.policy.room import DOUBLING_S, LAG_S, Room

SLOTS, DEPTH, LOOK_S = 8, 72, 0.25


class Simulated:
    """A server that counts requests late, and a client with as many lines as it may have."""

    def __init__(self, seed: int, lag: float = 0.0, ends: float = 0.5) -> None:
        self.room, self.now, self.lines, self.own = Room(), 0.0, DEPTH, 0
        self._chance, self._ends = random.Random(seed), ends
        self._counts = deque([0] * round(lag / LOOK_S))

    def look(self, others: int) -> int:
        """The number of lines after a look at a server with this number of requests of others."""
        if self._chance.random() < self._ends:  # some lines end, and the client sends others
            self.own -= self._chance.randint(0, min(SLOTS, self.own))
        self._counts.append(self.own + others)
        count = self._counts.popleft()
        self.lines = self.room.observe(count, self.own, DEPTH, SLOTS, self.now)
        self.own = self.lines if self._chance.random() < 0.9 else min(self.own, self.lines)
        self.now += LOOK_S
        return self.lines


@pytest.mark.parametrize("lag", [0.0, LAG_S])
@pytest.mark.parametrize("seed", range(5))
def test_a_client_that_is_alone_never_takes_its_own_lines_for_those_of_others(
    seed: int, lag: float
) -> None:
    server = Simulated(seed, lag)
    assert {server.look(0) for _ in range(2000)} == {DEPTH}


@pytest.mark.parametrize(("others", "lines"), [(1, 3), (2, 3), (4, 2), (6, 1), (8, 1), (100, 1)])
def test_lines_get_half_of_the_places_that_others_leave(others: int, lines: int) -> None:
    server = Simulated(0, ends=0.0)
    for _ in range(20):
        server.look(0)
    assert [server.look(DEPTH + others) for _ in range(20)][-1] == 1  # more than have a place
    for _ in range(100):
        server.look(others)
    assert server.lines == lines


def test_lines_come_back_slowly_and_in_full() -> None:
    server = Simulated(1)
    server.look(DEPTH + 8)
    seen = [server.look(0) for _ in range(200)]
    assert seen == sorted(seen)
    steps = round(DOUBLING_S / LOOK_S)
    assert seen[steps - 2] < 2 <= seen[steps]
    assert seen[-1] == DEPTH


@pytest.mark.parametrize("seed", range(5))
def test_short_requests_of_a_steady_stream_find_few_lines(seed: int) -> None:
    """Requests of half a second that come every two seconds."""
    chance, server = random.Random(seed), Simulated(seed)
    server.look(DEPTH + 1)
    found, until = [], 0.0
    for _ in range(4000):
        arrives = chance.random() < LOOK_S / 2.0
        if arrives:
            found.append(server.lines)
            until = server.now + 0.5
        server.look(1 if server.now < until else 0)
    assert sum(found) / len(found) < SLOTS
