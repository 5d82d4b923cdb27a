"""A server of two schedulers on two CPUs: both are tenants of one sidecar.

Target and draft model are the same small model with random weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmark.harness.speculation import states_of
from test.engine.awaiting import awaiting
from test.engine.server.running import (
    COMMON,
    GREEDY,
    QSPEC,
    generate,
    of_sidecar,
    sidecar_process,
    until,
)
from test.preloaded.server import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"),
]

PROMPTS = [
    "The sea was calm, and the boats went out. The sea was calm, and the boats",
    "List the months of the year: January, February, March",
    "What is the capital of Norway?",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
]
VARIED = {"frequency_penalty": 1.5}
"""Without it a model of random weights soon repeats one token. With it the sidecar, which applies
no penalties, drafts hardly any right token."""
FROM_SIDECAR = {"custom_params": {"qspec_sources": ["queue", "step"]}}
SCHEDULERS = (0, 1)


@pytest.fixture(scope="module")
def server(small_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = [
        *(*COMMON, "--dp-size", "2", "--enable-metrics"),
        *(*QSPEC, "--speculative-draft-model-path", str(small_target)),
    ]
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    with Server(small_target, arguments, environment=environment) as running:
        wait_for_sidecar(running)
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """Answers of the first scheduler without speculation."""
    answers = ids(ask(server, 0, **VARIED, custom_params={"qspec_enabled": False}))
    assert max(len(set(answer)) for answer in answers) > 10
    return answers


def wait_for_sidecar(server: Server) -> None:
    """Wait until all schedulers are connected to the sidecar."""
    until(lambda: {state["sidecar"] for state in states_of(server)} == {"ready"})


def ask(server: Server, scheduler: int, **sampling: Any) -> list[dict[str, Any]]:
    """The answers of one scheduler to all prompts at once."""

    def answer(text: str) -> dict[str, Any]:
        body = {"text": text, "sampling_params": {**GREEDY, **sampling}}
        found: dict[str, Any] = server.post("/generate", {**body, "routed_dp_rank": scheduler})
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(answer, PROMPTS))


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def drafted_by_the_sidecar(server: Server, scheduler: int) -> int:
    """Tokens that the sidecar drafted and this scheduler accepted."""
    return of_sidecar(states_of(server)[scheduler]["accepted_tokens"])


def test_both_schedulers_give_the_same_answers_with_drafts_of_one_sidecar(
    server: Server, expected: list[list[int]]
) -> None:
    assert [state["dp_rank"] for state in states_of(server)] == [*SCHEDULERS]
    plain = ids(ask(server, 0, custom_params={"qspec_enabled": False}))
    for scheduler in SCHEDULERS:
        answers = ask(server, scheduler, **VARIED)
        assert ids(answers) == expected
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {scheduler}
        before = drafted_by_the_sidecar(server, scheduler)
        assert ids(ask(server, scheduler, **FROM_SIDECAR)) == plain
        assert drafted_by_the_sidecar(server, scheduler) > before
    assert sidecar_process(server).is_running()
    assert not any(state["failed"] for state in states_of(server)), server.log[-4000:]


def test_metrics_tell_the_schedulers_apart(server: Server) -> None:
    wanted = "sglang:qspec_sidecar_state"
    ranks = {
        sample.labels["dp_rank"]
        for family in text_string_to_metric_families(server.get("/metrics/"))
        for sample in family.samples
        if sample.name == wanted and sample.labels["state"] == "ready" and sample.value == 1
    }
    assert ranks == {"0", "1"}


def test_a_setting_changes_on_all_schedulers(server: Server) -> None:
    for value in (0, 1):
        answer = server.post("/set_internal_state", {"server_args": {"qspec_enabled": value}})
        assert answer == [True, True]
        assert [state["settings"]["enabled"] for state in states_of(server)] == [value, value]


def test_a_killed_sidecar_comes_back_for_both_schedulers(
    server: Server, expected: list[list[int]]
) -> None:
    killed = sidecar_process(server)
    killed.kill()
    for scheduler in SCHEDULERS:
        assert ids(ask(server, scheduler, **VARIED)) == expected
    until(lambda: states_of(server)[0]["sidecar_restarts"] == 1)
    wait_for_sidecar(server)
    assert sidecar_process(server).pid != killed.pid
    assert states_of(server)[1]["sidecar_restarts"] == 0
    assert generate(server, PROMPTS[2], **VARIED)["output_ids"] == expected[2]
