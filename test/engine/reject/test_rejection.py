"""Rejection sampling on a running server: real target, real sidecar, drafted probabilities."""

from typing import Any

import pytest

from benchmark.harness.server import Server
from test.engine.frequencies import PARAMETERS, check_first_tokens
from test.engine.server.running import generate, turn
from test.engine.server.samples import SAMPLED, SAMPLED_TEXTS, check_equally_frequent

pytestmark = pytest.mark.server

STEPS = {"custom_params": {"qspec_sources": ["step"]}}


def test_sampled_texts_are_as_frequent_as_without_speculation(server: Server) -> None:
    turn(server, fixed_width=1)
    drafted = sampled(server, STEPS["custom_params"])
    steps = sum(answer["meta_info"]["qspec"]["accepted_by_source"]["step"] for answer in drafted)
    assert steps > len(drafted) / 4  # otherwise this would test plain decoding
    check_equally_frequent(drafted, sampled(server, {"qspec_enabled": False}))


def sampled(server: Server, custom_params: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to SAMPLED_TEXTS."""
    sampling = {**SAMPLED, "custom_params": custom_params}
    answers: list[dict[str, Any]] = server.post(
        "/generate", {"text": SAMPLED_TEXTS, "sampling_params": sampling}
    )
    return answers


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PARAMETERS)
def test_first_tokens_are_as_frequent_whatever_the_parameters(server: Server, name: str) -> None:
    check_first_tokens(server, PARAMETERS[name], STEPS["custom_params"], 1000)


def test_long_samples_accept_most_draft_tokens_and_differ(server: Server) -> None:
    answers = [
        generate(server, SAMPLED_TEXTS[0], temperature=0.7, ignore_eos=True, **STEPS)
        for _ in range(2)
    ]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    records = [answer["meta_info"]["qspec"] for answer in answers]
    # Independent draws would equal the draft token at about every second position.
    assert sum(r["accepted_tokens"] for r in records) > 2 * sum(r["passes"] for r in records)


def test_a_seed_still_gives_the_same_text(server: Server) -> None:
    texts = [
        generate(server, SAMPLED_TEXTS[0], temperature=1.0, sampling_seed=7)["output_ids"]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
