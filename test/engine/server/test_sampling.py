"""Penalized requests on a running server. `contract` tests sampled requests."""

import pytest

from benchmark.harness.server import Server
from test.engine.server.running import PENALIZED, Plain

pytestmark = pytest.mark.server


def test_penalized_answers_are_the_targets_own_in_fewer_passes(
    server: Server, plain: Plain, prompts: list[str]
) -> None:
    """The server without speculation uses SGLang's penalizers, which add one token per pass."""
    body = {"text": prompts[: len(PENALIZED)], "sampling_params": PENALIZED}
    answers = server.post("/generate", body)
    assert [a["output_ids"] for a in answers] == [p["output_ids"] for p in plain.penalized]
    assert plain.penalized[0]["output_ids"] != plain.greedy[0]["output_ids"]
    # The last one has no penalty.
    assert sum(answer["meta_info"]["qspec"]["accepted_tokens"] for answer in answers[:-1]) > 0
