"""The sidecar of a running server stops or dies."""

import signal
from typing import Any

import pytest

from benchmark.harness.server import Server
from test.engine.external.load import MAX_NEW_TOKENS, drafts_are_accepted, loaded
from test.engine.server.running import all_at_once, of_sidecar, sidecar_process, state, until

pytestmark = pytest.mark.server


def test_a_stopped_sidecar_changes_no_answer(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    process = sidecar_process(server)
    process.send_signal(signal.SIGSTOP)
    try:
        answers = all_at_once(server, prompts)
    finally:
        process.send_signal(signal.SIGCONT)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    until(lambda: state(server)["sidecar"] == "ready")


def test_a_sidecar_killed_in_the_middle_changes_nothing(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    """The server starts another sidecar, which drafts for later requests."""
    with loaded(server, prompts, [e["output_ids"][:MAX_NEW_TOKENS] for e in expected]):
        drafts_are_accepted(server)
        sidecar_process(server).kill()
        until(lambda: state(server)["sidecar_restarts"] == 1)
    until(lambda: state(server)["sidecar"] == "ready")
    before = state(server)["accepted_tokens"]
    answers = all_at_once(server, prompts)
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected]
    assert of_sidecar(state(server)["accepted_tokens"]) > of_sidecar(before)
