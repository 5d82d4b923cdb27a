"""A running server pauses guesses that are always wrong, and they change no answer.

The requests use guesses as their only draft source. Every pass verifies all drafts (`fixed_width`),
since the policy would propose wrong guesses only where they seem to cost nothing.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.harness.dataset import render
from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from benchmark.worst.loads import sampling
from sglang_qspec.tools.models import DemoModels

pytestmark = pytest.mark.server

ANSWER_TOKENS = 32
ROUNDS = 40
"""Only a broken build asks so often."""


def ask(server: Server, prompts: list[str], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sampled = [sampling(0.0, ANSWER_TOKENS, **params) for params in asked]
    answers: list[dict[str, Any]] = server.post(
        "/generate", {"text": prompts, "sampling_params": sampled}
    )
    return answers


def wrong(answer: list[int]) -> list[int]:
    """A guess that follows each token of the answer with a token that the answer lacks.

    A single right token may save more time than many wrong ones cost, where rows cost hardly any.
    """
    other = next(token for token in range(1000, 2000) if token not in answer)
    return [token for found in dict.fromkeys(answer) for token in (found, other)]


@pytest.fixture
def all_drafts(server: Server) -> Iterator[None]:
    server.post("/set_internal_state", {"server_args": {"qspec_fixed_width": 1}})
    yield
    server.post("/set_internal_state", {"server_args": {"qspec_fixed_width": 0}})


def guesses(server: Server) -> dict[str, Any]:
    state = server.get("/server_info")["internal_states"][0]["qspec"]
    found: dict[str, Any] = state["sources"]["guess"]
    return found


@pytest.mark.usefixtures("all_drafts")
def test_guesses_that_are_always_wrong_are_paused_and_change_no_answer(
    server: Server, models: DemoModels
) -> None:
    prompts = render(models.target, PROMPTS[:4])
    plain = ask(server, prompts, [{"qspec_enabled": False}] * len(prompts))
    misled = [
        {
            "qspec_sources": ["guess"],
            "qspec_guess_ids": wrong(answer["output_ids"]),
        }
        for answer in plain
    ]
    for _ in range(ROUNDS):
        answers = ask(server, prompts, misled)
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in plain]
        # A pause ends by itself, so an answer that goes on after its end may have drafts: the loop
        # then asks again. Each pause is twice as long as the one before.
        if guesses(server)["paused"]:
            alone = ask(server, prompts[:1], misled[:1])[0]
            assert alone["output_ids"] == plain[0]["output_ids"]
            if alone["meta_info"]["qspec"]["proposed_tokens"] == 0:
                break
    else:
        pytest.fail("guesses that are always wrong are never paused for a whole answer")
    assert "Drafts of source 'guess' cost more than they save: " in server.log
