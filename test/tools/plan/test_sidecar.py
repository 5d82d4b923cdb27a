"""The simulated sidecar: drafts, messages with a delay, turns and outages."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from sglang_qspec.config import SLOTS_ON_GPU, QSpecConfig
from sglang_qspec.sidecar.draft_queue import PROMPTS_AHEAD
from sglang_qspec.tools.plan.clock import Clock, Process, Signal, Wait
from sglang_qspec.tools.plan.requests import SimulatedRequest
from sglang_qspec.tools.plan.sidecar import Sidecar, TargetLink
from sglang_qspec.tools.plan.trace import Arrival
from test.tools.plan.examples import flat

STEP = 1.0


def request(agreed: str = "1" * 20, prompt: int = 5) -> SimulatedRequest:
    right = np.array([char == "1" for char in agreed])
    return SimulatedRequest(Arrival(0.0, prompt, len(agreed)), right)


class Driven:
    """A sidecar with a target that only commits."""

    def __init__(
        self,
        *,
        delay: float = 0.0,
        outages: tuple[tuple[float, float], ...] = (),
        read: float = 0.0,
        on_gpu: bool = False,
    ) -> None:
        """`read` are the seconds in which the draft model reads a token."""
        self.clock = Clock()
        given = flat(step=STEP, on_gpu=on_gpu)
        tables = msgspec.structs.replace(given, draft_prefill_token=read)
        self.sidecar = Sidecar(self.clock, tables, delay, outages)
        self.server = self.connect()

    def connect(self) -> TargetLink:
        return self.sidecar.connect(Signal())

    def commit(self, at: float, row: SimulatedRequest, done: int, lookahead: int = 4) -> None:
        def act() -> None:
            row.done = done
            self.server.lookahead = lookahead
            self.server.commit(row)

        self.clock.call(at, act)

    def seen(self, row: SimulatedRequest, times: list[float]) -> list[tuple[int, int]]:
        """The draft at the target at each of these times."""
        found: list[tuple[int, int]] = []
        for time in times:
            self.clock.call(time, lambda: found.append((row.seen_begin, row.seen_end)))
        self.clock.start(self.sidecar.run())
        self.clock.run()
        return found


def test_a_token_arrives_a_step_and_both_delays_after_its_commit() -> None:
    driven, row = Driven(delay=0.25), request()
    driven.commit(0.0, row, 1)
    assert driven.seen(row, [1.45, 1.55, 2.55, 9.0]) == [(0, 0), (1, 2), (1, 3), (1, 5)]


def test_a_draft_that_the_target_follows_goes_on_to_its_lookahead() -> None:
    driven, row = Driven(), request()
    driven.commit(0.0, row, 1)
    driven.commit(4.5, row, 3)
    assert driven.seen(row, [4.4, 6.6, 9.0]) == [(1, 5), (1, 7), (1, 7)]
    assert row.available == 4


def test_a_step_that_runs_is_not_part_of_the_draft_that_replaces_it() -> None:
    driven, row = Driven(), request("1101" * 5)
    driven.commit(0.0, row, 1)
    driven.commit(2.5, row, 3)  # the draft from 1 on is wrong at position 2
    assert driven.seen(row, [2.9, 3.1, 4.1]) == [(1, 3), (1, 3), (3, 4)]


def test_waiting_requests_are_drafted_after_served_ones() -> None:
    driven, served, waiting = Driven(), request(), request()
    driven.server.submit(waiting)
    driven.commit(0.5, served, 1, lookahead=2)
    assert driven.seen(waiting, [1.1, 3.1, 4.1]) == [(0, 1), (0, 1), (0, 2)]


def test_a_step_reads_a_long_prompt_in_parts() -> None:
    driven, row = Driven(read=0.01), request(prompt=301)
    driven.server.submit(row)
    # A step reads 256 tokens, and the next one the other 44 and drafts the first token.
    first = 2 * STEP + 3.0
    assert driven.seen(row, [first - 0.1, first + 0.1]) == [(0, 0), (0, 1)]


def test_beside_served_requests_a_step_reads_little_for_waiting_ones() -> None:
    driven, served, waiting = Driven(read=0.01), request(), request(prompt=301)
    driven.commit(0.0, served, 1, lookahead=1)
    driven.clock.call(0.5, lambda: driven.server.submit(waiting))
    driven.commit(2.0, served, 2, lookahead=1)
    # The step for the waiting request takes 1.32 s instead of 3.56 s.
    assert driven.seen(served, [2.2, 3.5]) == [(1, 2), (1, 3)]


def test_a_step_extends_as_many_drafts_as_the_sidecar_decodes_at_once_in_turn() -> None:
    driven = Driven(on_gpu=True)
    more = 2 * SLOTS_ON_GPU // PROMPTS_AHEAD - 1
    servers = [driven.server, *(driven.connect() for _ in range(more))]
    rows = [[request("1") for _ in range(PROMPTS_AHEAD)] for _ in servers]
    for server, theirs in zip(servers, rows, strict=True):
        for row in theirs:
            server.submit(row)
    found: list[list[int]] = []
    for time in (1.1, 2.1):
        driven.clock.call(time, lambda: found.append([sum(r.seen_end for r in x) for x in rows]))
    driven.seen(rows[0][0], [])
    assert found == [[each] * len(servers) for each in (PROMPTS_AHEAD // 2, PROMPTS_AHEAD)]


def test_a_queue_draft_ends_at_the_most_tokens_of_a_completion() -> None:
    driven, row = Driven(), request("1" * 2 * QSpecConfig.max_completion_tokens)
    driven.server.submit(row)
    driven.seen(row, [])
    assert row.seen_end == QSpecConfig.max_completion_tokens


def test_tokens_of_waiting_requests_do_not_end_the_wait_of_a_target() -> None:
    driven, waits = Driven(), []

    def target() -> Process:
        waits.append((yield Wait(driven.server.arrived, 2.5)))
        driven.commit(0.0, request(), 1)
        waits.append((yield Wait(driven.server.arrived, 2.5)))

    driven.server.submit(request())
    driven.clock.start(target())
    driven.seen(request(), [])
    assert waits == [False, True]


def test_a_text_that_matches_its_draft_again_keeps_the_match_while_the_draft_grows() -> None:
    driven, row = Driven(), request("01" * 10)
    driven.server.submit(row)

    def match_again() -> None:
        row.done = row.seen_begin = 3

    driven.clock.call(5.5, match_again)
    assert driven.seen(row, [5.6, 6.6]) == [(3, 5), (3, 6)]


def test_servers_on_a_cpu_take_turns() -> None:
    driven = Driven()
    rows = [request(), request()]
    for server, row in zip((driven.server, driven.connect()), rows, strict=True):
        server.submit(row)
    driven.seen(rows[0], [])
    assert [row.end for row in rows] == [20, 20]
    assert driven.sidecar.busy_seconds == pytest.approx(40 * STEP)


def test_an_outage_loses_the_running_step_and_the_draft_begins_anew_after_it() -> None:
    driven, row = Driven(outages=((1.5, 5.0),)), request()
    driven.commit(0.0, row, 1)
    assert driven.seen(row, [1.1, 5.9, 6.1, 20.0]) == [(1, 2), (1, 2), (1, 2), (1, 5)]
    assert driven.sidecar.sessions == 2


def test_a_draft_that_was_complete_before_an_outage_is_drafted_again() -> None:
    driven, row = Driven(outages=((1.5, 5.0),)), request()
    driven.commit(0.0, row, 1, lookahead=1)
    assert driven.seen(row, [9.0]) == [(1, 2)]
    assert driven.sidecar.drafted == 2


def test_a_finished_request_is_forgotten() -> None:
    driven, row = Driven(), request()
    driven.commit(0.0, row, 1)

    def end() -> None:
        row.finished = driven.clock.now
        driven.server.close(row)

    driven.clock.call(1.5, end)
    assert driven.seen(row, [9.0]) == [(1, 2)]
    kept = [driven.server.served, driven.server.growing, driven.server.waiting]
    assert kept == [{}, {}, {}]
