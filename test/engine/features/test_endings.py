"""An answer ends at the right token if its end is amid the tokens that a pass accepts."""

from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from test.engine.features.asking import PLAIN, TEXT, ask, both, check_same, guessing

pytestmark = pytest.mark.server

HELLO = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize(
    "stop", [{"stop": "woman"}, {"stop": ["zzz", "d wom"]}, {"stop_regex": "wom[a-z]n"}], ids=str
)
def test_a_stop_string_in_an_accepted_run_ends_the_answer_there(
    server: Server, story: dict[str, Any], stop: dict[str, Any], trim: bool
) -> None:
    assert "wise old woman" in story["text"]
    sampling = {"max_new_tokens": 32, "no_stop_trim": not trim, **stop}
    plain, ours = both(server, sampling, story["output_ids"])
    check_same(plain, ours)
    assert ours["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(ours["output_ids"]) < len(story["output_ids"])


def test_a_stop_token_in_an_accepted_run_ends_the_answer_there(
    server: Server, story: dict[str, Any]
) -> None:
    for place in (1, 2, 7, 20):
        sampling = {"max_new_tokens": 32, "stop_token_ids": [story["output_ids"][place]]}
        plain, ours = both(server, sampling, story["output_ids"])
        check_same(plain, ours, accepted=len(plain["output_ids"]) > 3)
        assert ours["meta_info"]["finish_reason"]["type"] == "stop"


def test_the_token_limit_holds_in_the_middle_of_an_accepted_run(
    server: Server, story: dict[str, Any]
) -> None:
    for limit in (0, 1, 2, 3, 4, 7, 18):
        plain, ours = both(server, {"max_new_tokens": limit}, story["output_ids"])
        check_same(plain, ours, accepted=limit > 2)
        assert ours["output_ids"] == story["output_ids"][:limit]
        if limit > 1:  # otherwise no pass decodes
            check_counts(ours["meta_info"])


def check_counts(meta: dict[str, Any]) -> None:
    """Fail unless SGLang's counts of accepted drafts are those of QSPEC's record."""
    record, histogram = meta["qspec"], meta.get("spec_correct_drafts_histogram", [])
    assert sum(histogram) == record["passes"] == meta.get("spec_verify_ct", 0)
    accepted = sum(drafts * passes for drafts, passes in enumerate(histogram))
    assert accepted == record["accepted_tokens"] == meta.get("spec_num_correct_drafts", 0)


@pytest.mark.parametrize("limit", [1, 10, 23, 40])
def test_reasoning_tokens_are_tokens_of_the_answer(server: Server, limit: int) -> None:
    counting = " ".join(f"{number}," for number in range(1, 15))
    usages = [
        server.post(
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "Count to one hundred."}],
                "temperature": 0,
                "max_tokens": limit,
                "custom_params": custom,
            },
        )["usage"]
        for custom in (PLAIN, {"qspec_guesses": [counting]})
    ]
    assert usages[1]["reasoning_tokens"] == usages[0]["reasoning_tokens"] > 0
    assert usages[1]["completion_tokens"] == usages[0]["completion_tokens"] == limit


def test_an_end_of_text_ends_the_answer_unless_it_is_ignored(server: Server) -> None:
    ended = both(server, {"max_new_tokens": 60}, text=HELLO)
    check_same(*ended)
    assert ended[1]["meta_info"]["finish_reason"]["type"] == "stop"
    for special in (True, False):
        sampling = {"max_new_tokens": 60, "ignore_eos": True, "skip_special_tokens": special}
        plain, ours = both(server, sampling, text=HELLO)
        check_same(plain, ours)
        assert len(ours["output_ids"]) == 60


def test_a_stop_token_is_not_accepted_before_min_new_tokens(
    server: Server, story: dict[str, Any]
) -> None:
    sampling = {
        "max_new_tokens": 24,
        "min_new_tokens": 12,
        "stop_token_ids": [story["output_ids"][5]],
    }
    plain, ours = both(server, sampling)
    check_same(plain, ours, accepted=False)
    assert len(ours["output_ids"]) >= 12


@pytest.mark.parametrize("room", [5, 9, 24])
def test_an_answer_may_end_with_the_context(server: Server, room: int) -> None:
    """KV slots reserved after the last tokens would lie outside the request's row."""
    prompt = [300 + number % 50 for number in range(254 - room)]
    plain, ours = both(server, {"max_new_tokens": room, "ignore_eos": True}, input_ids=prompt)
    check_same(plain, ours, accepted=False)
    assert len(ours["output_ids"]) == room
    check_same(*both(server, {"max_new_tokens": 8}))


@pytest.mark.parametrize("prompt", [{"text": "word " * 600}, {"input_ids": [300] * 600}])
def test_a_prompt_that_does_not_fit_is_a_400(server: Server, prompt: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="HTTP 400.*context length"):
        ask(server, {"max_new_tokens": 8, "custom_params": guessing([1, 2])}, **prompt)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ""}),
        ("/generate", {"text": "<NGRAMGUESS>hi</NGRAMGUESS>", "stream": True}),
        ("/generate", {"text": ["a", "<NGRAMGUESS>hi</NGRAMGUESS>"]}),
        ("/v1/completions", {"model": "m", "prompt": "<NGRAMGUESS>hi</NGRAMGUESS>"}),
    ],
)
def test_a_prompt_of_no_tokens_is_a_400(server: Server, path: str, body: dict[str, Any]) -> None:
    """An empty prompt would end SGLang's scheduler. A prompt that is only a guess becomes empty."""
    with pytest.raises(ServerError, match="HTTP 400.*prompt is empty"):
        server.post(path, body)
    assert ask(server, {"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2


def test_of_several_ends_in_an_accepted_run_the_first_counts(
    server: Server, story: dict[str, Any]
) -> None:
    """The order of stops in the request does not matter, and a stop token may come first."""
    by_token = {"stop": ["woman"], "stop_token_ids": [story["output_ids"][3]]}
    for stops in ({"stop": ["woman", " old", " wise"]}, by_token):
        sampling = {"max_new_tokens": 32, **stops}
        # The second time the drafts are trusted, and all ends are in one pass.
        for _ in range(2):
            check_same(*both(server, sampling, story["output_ids"]), accepted=False)
    logprobs = {"return_logprob": True}
    plain, ours = both(server, sampling, story["output_ids"], **logprobs)
    check_same(plain, ours, accepted=False)


def test_a_stream_never_shows_text_after_a_stop_string(
    server: Server, story: dict[str, Any]
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 32, "stop": ["woman", " was"]}
    plain, ours = both(server, sampling, story["output_ids"])
    body = {
        "text": TEXT,
        "sampling_params": {**sampling, "custom_params": guessing(story["output_ids"])},
    }
    texts = [piece["text"] for piece in server.stream("/generate", {**body, "stream": True})]
    assert texts[-1] == ours["text"] == plain["text"]
    assert all(texts[-1].startswith(text) for text in texts)


def test_a_stop_regex_whose_search_does_not_end_is_refused(server: Server) -> None:
    """Without a limit no request would get another token for years."""
    sampling = {"max_new_tokens": 80, "regex": "a{90}!", "stop_regex": "(a+)+b"}
    for custom in (PLAIN, {"qspec_guess_ids": [[81] * 40]}):
        with pytest.raises(ServerError, match="HTTP 400.*stop_regex"):
            ask(server, {**sampling, "custom_params": custom})
    check_same(*both(server, {"max_new_tokens": 16, "stop_regex": "wom[a-z]n"}))
