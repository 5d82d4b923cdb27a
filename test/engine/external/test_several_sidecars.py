"""A second sidecar joins the running server, and either one is stopped, killed or removed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from sglang_qspec.config import MODES
from sglang_qspec.engine.sidecar.endpoints import PREFIX
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import held
from test.engine.contract import Answers, Bodies
from test.engine.external.sidecars import Sidecars
from test.engine.load import drafts_are_accepted, loaded
from test.engine.server.running import GREEDY, ids, state, turn, until

pytestmark = pytest.mark.server

MANY = [f"Number {number} of the list is" for number in range(24)]
"""Different prompts, which surely reach both sidecars."""


@pytest.fixture(scope="module")
def other(server: Server, sidecars: Sidecars, models: DemoModels) -> Iterator[Sidecars]:
    """A second sidecar, which the server uses during the tests of this module."""
    turn(server, mode=MODES.index("auto"), fixed_width=0, step_tokens=16)
    second = Sidecars(models, sidecars.endpoint + "2", sidecars.environment)
    second.start()
    try:
        assert change(server, second, 1) == [True]
        until(lambda: both_ready(server))
        yield second
    finally:
        change(server, second, 0)
        second.close()


def change(server: Server, which: Sidecars, value: int) -> Any:
    """Add (1) or remove (0) a sidecar while the server runs."""
    update = {"server_args": {PREFIX + which.endpoint: value}}
    return server.post("/set_internal_state", update)


def entry(server: Server, which: Sidecars) -> dict[str, Any]:
    """The figures of one sidecar in /server_info."""
    listed = state(server)["sidecars"]
    found: dict[str, Any] = next(each for each in listed if each["endpoint"] == which.endpoint)
    return found


def both_ready(server: Server) -> bool:
    return [each["state"] for each in state(server)["sidecars"]] == ["ready", "ready"]


def has_requests(server: Server, which: Sidecars) -> bool:
    return bool(entry(server, which)["requests"])


def drafts_of(server: Server, which: Sidecars) -> None:
    """Wait until a sidecar has drafted for the load."""
    before = entry(server, which)["drafted_tokens"]
    until(lambda: entry(server, which)["drafted_tokens"] > before + 20)


def test_both_sidecars_draft_and_equal_prompts_meet_on_one(
    server: Server, sidecars: Sidecars, other: Sidecars
) -> None:
    short = {**GREEDY, "max_new_tokens": 8, "ignore_eos": True}
    off = {**short, "custom_params": {"qspec_enabled": False}}
    expected = server.post("/generate", {"text": MANY, "sampling_params": off})
    with ThreadPoolExecutor(1) as pool:
        with held(server):
            asked = pool.submit(server.post, "/generate", {"text": MANY, "sampling_params": short})
            until(lambda: has_requests(server, sidecars) and has_requests(server, other))
        answers = asked.result()
        with held(server):
            equal = {"text": MANY[:1] * 12, "sampling_params": short}
            asked = pool.submit(server.post, "/generate", equal)
            until(lambda: state(server)["live_requests"] == 12)
            counts = [each["requests"] for each in state(server)["sidecars"]]
            assert sorted(counts) == [0, 12]
        repeated = asked.result()
    assert ids(answers) == ids(expected)
    assert {tuple(a["output_ids"]) for a in repeated} == {tuple(expected[0]["output_ids"])}


def test_a_killed_sidecars_requests_get_drafts_of_the_other_and_no_answer_changes(
    server: Server, sidecars: Sidecars, other: Sidecars, bodies: Bodies, expected: Answers
) -> None:
    until(lambda: both_ready(server))
    with loaded(server, bodies, expected):
        until(lambda: entry(server, other)["requests"] > 1)
        moved = state(server)["handovers"]
        other.kill()
        until(lambda: entry(server, other)["state"] == "lost")
        assert not has_requests(server, other)
        drafts_of(server, sidecars)
        drafts_are_accepted(server)
        assert state(server)["sidecar"] == "ready"
        assert state(server)["handovers"] > moved
    other.start()
    until(lambda: both_ready(server))
    with loaded(server, bodies, expected):
        until(lambda: has_requests(server, other))
        drafts_of(server, other)


def test_a_stopped_sidecar_loses_its_requests_and_gets_new_ones_when_it_goes_on(
    server: Server, sidecars: Sidecars, other: Sidecars, bodies: Bodies, expected: Answers
) -> None:
    until(lambda: both_ready(server))
    with loaded(server, bodies, expected):
        until(lambda: has_requests(server, sidecars))
        sidecars.signal(signal.SIGSTOP)
        until(lambda: entry(server, sidecars)["state"] == "lost")
        assert not has_requests(server, sidecars)
        drafts_of(server, other)
        sidecars.signal(signal.SIGCONT)
        until(lambda: both_ready(server))
        drafts_of(server, sidecars)


def test_a_sidecar_is_removed_and_added_under_load(
    server: Server, sidecars: Sidecars, other: Sidecars, bodies: Bodies, expected: Answers
) -> None:
    until(lambda: both_ready(server))
    with loaded(server, bodies, expected):
        until(lambda: has_requests(server, sidecars))
        assert change(server, sidecars, 0) == [True]
        (left,) = state(server)["sidecars"]
        assert left["endpoint"] == other.endpoint
        drafts_are_accepted(server)
        assert change(server, sidecars, 1) == [True]
        until(lambda: both_ready(server))
        drafts_of(server, sidecars)


def test_a_wrong_change_of_the_endpoints_changes_nothing(server: Server, other: Sidecars) -> None:
    before = [each["endpoint"] for each in state(server)["sidecars"]]

    def update(**changes: float) -> Any:
        return server.post("/set_internal_state", {"server_args": changes})

    added = PREFIX + other.endpoint + "3"
    for name, value, message in (
        (PREFIX + "nowhere", 1, "it must have ipc://PATH or tcp://HOST:PORT"),
        (PREFIX + "tcp://127.0.0.1:5555", 1, "needs a key file"),
        (PREFIX + other.endpoint, 2, "must be 1 .* or 0"),
    ):
        with pytest.raises(ServerError, match=f"HTTP 400.*{message}"):
            update(**{added: 1, name: value})
    assert update(**{added: 1, added + "4": 0}) == [False], "no such endpoint"
    too_many = {f"{added}{number}": 1.0 for number in range(15)}
    assert update(**too_many) == [False]
    assert [each["endpoint"] for each in state(server)["sidecars"]] == before
