"""Log probabilities and hidden states of answers with drafts."""

from typing import Any

import pytest

from benchmark.harness.server import Server
from test.engine.features.asking import PLAIN, TEXT, ask, both, check_same, guessing

pytestmark = pytest.mark.server

LOGPROBS = [f"{side}_{kind}logprobs" for side in ("input", "output") for kind in ("token_", "top_")]
LOGPROBS += ["input_token_ids_logprobs", "output_token_ids_logprobs"]
TOLERANCE = 1e-3


def check_close(ours: Any, plain: Any, tolerance: float = TOLERANCE) -> None:
    """Fail unless nested lists have the same form, ids and texts, and nearly the same floats."""
    if isinstance(plain, list):
        assert len(ours) == len(plain)
        for mine, theirs in zip(ours, plain, strict=True):
            check_close(mine, theirs, tolerance)
    elif isinstance(plain, float):
        assert ours == pytest.approx(plain, abs=tolerance)
    else:
        assert ours == plain


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_logprobs_num": 3, "return_text_in_logprobs": True},
        {"top_logprobs_num": 2, "logprob_start_len": 0, "token_ids_logprob": [5, 9, 11]},
        {"logprob_start_len": 4, "token_ids_logprob": [1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("end", [{"max_new_tokens": 18}, {"max_new_tokens": 32, "stop": "woman"}])
def test_log_probabilities_are_those_of_plain_decoding(
    server: Server, story: dict[str, Any], asked: dict[str, Any], end: dict[str, Any]
) -> None:
    plain, ours = both(server, end, story["output_ids"], return_logprob=True, **asked)
    check_same(plain, ours)
    assert len(ours["meta_info"]["output_token_logprobs"]) == len(ours["output_ids"])
    for name in LOGPROBS:
        check_close(ours["meta_info"].get(name), plain["meta_info"].get(name))


def test_a_batch_may_ask_for_different_log_probabilities(
    server: Server, story: dict[str, Any]
) -> None:
    asked = {
        "text": [TEXT] * 3,
        "return_logprob": [True, False, True],
        "top_logprobs_num": [2, 0, 0],
        "token_ids_logprob": [[1, 2], [6], [3, 4, 5]],
    }
    sampling = {"max_new_tokens": 16}
    plain = ask(server, {**sampling, "custom_params": PLAIN}, **asked)
    ours = ask(server, {**sampling, "custom_params": guessing(story["output_ids"])}, **asked)
    for mine, theirs in zip(ours, plain, strict=True):
        check_same(theirs, mine)
        for name in LOGPROBS:
            check_close(mine["meta_info"].get(name), theirs["meta_info"].get(name))


def test_an_answer_of_no_tokens_has_no_log_probabilities_of_tokens(server: Server) -> None:
    """But it has the scores of given tokens after the prompt."""
    asked = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [5, 9]}
    meta = ask(server, {"max_new_tokens": 0}, **asked)["meta_info"]
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == 0
    assert meta["output_token_logprobs"] == []
    assert [len(one) for one in meta["output_token_ids_logprobs"]] == [2]


@pytest.mark.parametrize("custom_params", [PLAIN, None])
def test_completions_echo_the_prompt_with_its_log_probabilities(
    server: Server, story: dict[str, Any], custom_params: dict[str, Any] | None
) -> None:
    body = {"model": "m", "prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 12}
    custom = custom_params or guessing(story["output_ids"])
    answer = server.post("/v1/completions", {**body, "temperature": 0, "custom_params": custom})
    choice = answer["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    assert (
        "".join(tokens) == choice["text"] == TEXT + story["text"][: len(choice["text"]) - len(TEXT)]
    )
    assert len(tokens) == answer["usage"]["prompt_tokens"] + 12
    assert len(choice["logprobs"]["top_logprobs"]) == len(tokens)


@pytest.mark.parametrize("end", [{"max_new_tokens": 12}, {"max_new_tokens": 32, "stop": "woman"}])
def test_hidden_states_are_those_of_the_tokens_that_were_accepted(
    server: Server, story: dict[str, Any], end: dict[str, Any]
) -> None:
    plain, ours = both(server, end, story["output_ids"], return_hidden_states=True)
    check_same(plain, ours)
    theirs, mine = plain["meta_info"]["hidden_states"], ours["meta_info"]["hidden_states"]
    # The first entry is that of the prompt, as far as it was not cached. The scheduler also keeps
    # the states of tokens that the last pass accepted after a stop.
    check_close(mine[1 : len(theirs)], theirs[1:], tolerance=0.02)
    assert len(mine) >= len(theirs) == len(plain["output_ids"])
