"""A running server soon leaves out guesses that are always wrong, and they change no answer.

The requests use guesses as their only draft source.
"""

import time
from typing import Any

import pytest

from benchmark.harness.dataset import render
from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from benchmark.worst.loads import misleading, sampling
from sglang_qspec.models import DemoModels

pytestmark = pytest.mark.server

ANSWER_TOKENS = 32
VOCAB = 49152


def ask(server: Server, prompts: list[str], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sampled = [sampling(0.0, ANSWER_TOKENS, **params) for params in asked]
    answers: list[dict[str, Any]] = server.post(
        "/generate", {"text": prompts, "sampling_params": sampled}
    )
    return answers


def test_guesses_that_are_always_wrong_are_soon_left_out_and_change_no_answer(
    server: Server, models: DemoModels
) -> None:
    prompts = render(models.target, PROMPTS[:4])
    plain = ask(server, prompts, [{"qspec_enabled": False}] * len(prompts))
    misled = [
        {
            "qspec_sources": ["guess"],
            "qspec_guess_ids": misleading(answer["output_ids"], VOCAB),
        }
        for answer in plain
    ]
    deadline = time.monotonic() + 120  # only a broken build reaches it
    # Either the source is paused, or the requests have no credit and decode plainly.
    while True:
        answers = ask(server, prompts, misled)
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in plain]
        records = [answer["meta_info"]["qspec"] for answer in answers]
        if sum(r["proposed_tokens"] for r in records) < sum(r["passes"] for r in records) / 10:
            break
        assert time.monotonic() < deadline, "wrong guesses are proposed all the time"
