"""Guesses that the target improves are accepted, and change no answer, on a server of their own.

Passes of a fixed width verify guesses at no cost, so no policy leaves them out for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from test.engine.awaiting import awaiting
from test.engine.features.asking import PLAIN
from test.engine.server.running import cores
from test.heads.tiny import write_target
from test.preloaded.server import Server

pytestmark = pytest.mark.server
JACOBI = {"qspec_sources": ["jacobi"]}
PROMPTS = [[5, 9, 30, 31], [40, 41, 42, 43, 44, 45], [7] * 9, list(range(10, 40))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target = write_target(tmp_path_factory.mktemp("target"))
    arguments = [
        *("--device", "cpu", "--dtype", "float32", "--sleep-on-idle", "--log-level", "warning"),
        *("--max-running-requests", "4", "--max-total-tokens", "4096", "--context-length", "256"),
        *("--speculative-algorithm", "QSPEC", "--speculative-num-draft-tokens", "4"),
        *("--speculative-qspec-jacobi-tokens", "3", "--speculative-qspec-width", "fixed"),
        *("--speculative-qspec-verify", "tree"),
    ]
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    with Server(target, arguments, cores=cores(0), environment=environment) as running:
        yield running


def ask(server: Server, custom: dict[str, Any], **sampling: Any) -> list[dict[str, Any]]:
    given = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True, **sampling}
    body = {"input_ids": PROMPTS, "sampling_params": {**given, "custom_params": custom}}
    answers: list[dict[str, Any]] = server.post("/generate", body)
    return answers


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"logit_bias": {"60": 100.0}},
        {"temperature": 1.0, "sampling_seed": 11},
        {"frequency_penalty": 0.7},
    ],
)
def test_guesses_of_the_target_change_no_answer(server: Server, sampling: dict[str, Any]) -> None:
    plain = ask(server, PLAIN, **sampling)
    ours = ask(server, JACOBI, **sampling)
    assert [each["output_ids"] for each in ours] == [each["output_ids"] for each in plain]
    records = [each["meta_info"]["qspec"] for each in ours]
    assert sum(record["proposed_tokens"] for record in records) > 0
    for record in records:
        assert record["accepted_by_source"]["jacobi"] == record["accepted_tokens"]
    if "logit_bias" in sampling:  # the same token again and again, which is soon guessed
        assert sum(record["accepted_tokens"] for record in records) > 0
