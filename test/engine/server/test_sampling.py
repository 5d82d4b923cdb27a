"""Sampled requests on a running server: the same distribution, and one text for each seed."""

import pytest

from benchmark.harness.server import Server
from test.engine.server.running import MAX_NEW_TOKENS, PENALIZED, Plain, generate, of_sidecar, state
from test.engine.server.samples import SAMPLED, SAMPLED_TEXTS, check_equally_frequent

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


def test_temperature_is_honoured_while_speculating(server: Server, prompts: list[str]) -> None:
    answers = [generate(server, prompts[0], temperature=1.5) for _ in range(3)]
    assert len({answer["text"] for answer in answers}) == 3


def test_sampled_texts_are_as_frequent_as_without_speculation(server: Server, plain: Plain) -> None:
    """Chi-square over whole texts; rare texts are one class."""
    answers = server.post("/generate", {"text": SAMPLED_TEXTS, "sampling_params": SAMPLED})
    accepted = sum(answer["meta_info"]["qspec"]["accepted_tokens"] for answer in answers)
    assert accepted > len(answers) / 4  # otherwise this would test plain decoding
    check_equally_frequent(answers, plain.sampled)


def test_a_seed_gives_the_same_text_with_drafts_and_without(
    server: Server, prompts: list[str]
) -> None:
    """Requests in one call, with filters and without, each with its own seed."""
    before = of_sidecar(state(server)["accepted_tokens"])
    texts = {}
    for enabled in (True, False):
        sampling = [
            {
                "temperature": 1.0,
                "top_p": 0.9 if number % 2 else 1.0,
                "sampling_seed": number,
                "max_new_tokens": MAX_NEW_TOKENS,
                "custom_params": {"qspec_enabled": enabled},
            }
            for number in range(len(prompts))
        ]
        answers = server.post("/generate", {"text": prompts, "sampling_params": sampling})
        texts[enabled] = [answer["output_ids"] for answer in answers]
    assert texts[True] == texts[False]
    assert of_sidecar(state(server)["accepted_tokens"]) > before
    other = generate(server, prompts[0], temperature=1.0, sampling_seed=99)
    assert other["output_ids"] != texts[True][0]
