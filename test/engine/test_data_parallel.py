"""A server of two schedulers on two CPUs: both are tenants of one sidecar.

Target and draft model are the same small model with random weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmark.harness.speculation import states_of
from test.engine.awaiting import awaiting
from test.engine.contract import Answers, Bodies, ServerContract
from test.engine.server.running import COMMON, PLAIN, QSPEC, ask_all, connected, ids, until
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
        connected(running)
        yield running


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    """All prompts, with a penalty and without, to each scheduler."""
    return [
        {"text": text, "sampling_params": own, "routed_dp_rank": scheduler}
        for text in PROMPTS
        for own in (VARIED, FROM_SIDECAR)
        for scheduler in SCHEDULERS
    ]


@pytest.fixture(scope="module")
def expected(server: Server, bodies: Bodies) -> Answers:
    return ask_all(server, bodies, **PLAIN)


def test_both_schedulers_give_the_same_answers(server: Server, expected: Answers) -> None:
    assert [state["dp_rank"] for state in states_of(server)] == [*SCHEDULERS]
    first, second = (expected[scheduler :: len(SCHEDULERS)] for scheduler in SCHEDULERS)
    assert ids(first) == ids(second)
    assert max(len(set(answer)) for answer in ids(first)) > 10
    for scheduler, answers in enumerate((first, second)):
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {scheduler}


def test_metrics_tell_the_schedulers_apart(server: Server) -> None:
    wanted = "sglang:qspec_sidecar_state"

    def ranks() -> set[str]:
        return {
            sample.labels["dp_rank"]
            for family in text_string_to_metric_families(server.get("/metrics/"))
            for sample in family.samples
            if sample.name == wanted and sample.labels["state"] == "ready" and sample.value == 1
        }

    until(lambda: ranks() == {"0", "1"})  # each scheduler writes its series now and then


class TestContract(ServerContract):
    """Both schedulers have drafts of one sidecar."""
