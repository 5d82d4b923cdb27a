"""Rejection sampling on a running server: real target, real sidecar, drafted probabilities."""

import pytest

from benchmark.harness.server import Server
from test.engine.frequencies import PARAMETERS, TEXT, check_first_tokens
from test.engine.server.running import generate, turned

pytestmark = pytest.mark.server

STEPS = {"custom_params": {"qspec_sources": ["step"]}}


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PARAMETERS)
def test_first_tokens_are_as_frequent_whatever_the_parameters(server: Server, name: str) -> None:
    with turned(server, fixed_width=1):
        check_first_tokens(server, PARAMETERS[name], STEPS["custom_params"], 1000)


def test_long_samples_accept_most_draft_tokens_and_differ(server: Server) -> None:
    with turned(server, fixed_width=1):
        answers = [
            generate(server, TEXT, temperature=0.7, ignore_eos=True, **STEPS) for _ in range(2)
        ]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    records = [answer["meta_info"]["qspec"] for answer in answers]
    # Independent draws would equal the draft token at about every second position.
    assert sum(r["accepted_tokens"] for r in records) > 2 * sum(r["passes"] for r in records)
