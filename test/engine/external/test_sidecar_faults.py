"""Sidecar processes that send wrong messages or are replaced, under load.

The server runs in float32 and the requests are greedy. `contract` stops and kills sidecars.
"""

from __future__ import annotations

import signal
import time

import pytest

from benchmark.harness.server import Server
from sglang_qspec.config import MODES
from test.engine.contract import Answers, Bodies
from test.engine.external.sidecars import Sidecars
from test.engine.load import drafts_are_accepted, loaded
from test.engine.server.running import state, turn, until

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", autouse=True)
def settings(server: Server) -> None:
    """Restore the settings of the start, because other modules of this folder change them."""
    turn(server, mode=MODES.index("auto"), fixed_width=0, step_tokens=16)


def test_a_slow_sidecar_that_sends_wrong_messages_changes_no_output(
    server: Server, sidecars: Sidecars, bodies: Bodies, expected: Answers
) -> None:
    sidecars.close()
    until(lambda: state(server)["sidecar"] == "lost")
    before = state(server)
    sidecars.start_lying(seed=5)
    with loaded(server, bodies, expected):
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
    server: Server, sidecars: Sidecars, bodies: Bodies, expected: Answers
) -> None:
    sidecars.close()
    sidecars.start()
    with loaded(server, bodies, expected):
        until(lambda: state(server)["sidecar"] == "ready")
        drafts_are_accepted(server)
