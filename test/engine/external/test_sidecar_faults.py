"""Sidecar processes that are stopped, killed, replaced or send wrong messages, under load.

The server runs in float32 and the requests are greedy. `server/test_sidecar` tests how a server
restarts its own sidecar.
"""

from __future__ import annotations

import random
import signal
import time

import pytest

from benchmark.harness.server import Server
from sglang_qspec.config import MODES
from test.engine.external.load import drafts_are_accepted, loaded
from test.engine.external.sidecars import Sidecars
from test.engine.server.running import state, turn, until

pytestmark = pytest.mark.server


@pytest.fixture(scope="module", autouse=True)
def settings(server: Server) -> None:
    """Restore the settings of the start, because other modules of this folder change them."""
    turn(server, mode=MODES.index("auto"), fixed_width=0, step_tokens=16)


def test_stopping_resuming_and_killing_a_sidecar_changes_no_output(
    server: Server, sidecars: Sidecars, few: list[str], plain: list[list[int]]
) -> None:
    until(lambda: state(server)["sidecar"] == "ready")
    rng = random.Random(11)
    with loaded(server, few, plain):
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
    server: Server, sidecars: Sidecars, few: list[str], plain: list[list[int]]
) -> None:
    sidecars.close()
    before = state(server)
    sidecars.start_lying(seed=5)
    with loaded(server, few, plain):
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
    server: Server, sidecars: Sidecars, few: list[str], plain: list[list[int]]
) -> None:
    sidecars.close()
    sidecars.start()
    with loaded(server, few, plain):
        until(lambda: state(server)["sidecar"] == "ready")
        drafts_are_accepted(server)
