"""Guesses on a running server are used, leave no trace in the prompt, or are refused."""

from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from benchmark.prompts import PROMPTS
from test.engine.server.running import GREEDY, MAX_NEW_TOKENS, generate, of_sidecar, tagged

pytestmark = pytest.mark.server


def test_a_guess_is_used_and_leaves_no_trace_in_the_prompt(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    answer = generate(server, tagged(prompts[1], expected[1]["text"]))
    assert answer["output_ids"] == expected[1]["output_ids"]
    assert answer["meta_info"]["prompt_tokens"] == expected[1]["meta_info"]["prompt_tokens"]
    record = answer["meta_info"]["qspec"]
    by_source = record["accepted_by_source"]
    assert by_source["guess"] + of_sidecar(by_source) > MAX_NEW_TOKENS / 2
    assert by_source["guess"] > 0


def test_a_batch_has_guesses_of_its_own(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    texts = [tagged(prompts[0], expected[0]["text"]), prompts[1]]
    answers = server.post("/generate", {"text": texts, "sampling_params": GREEDY})
    assert [a["output_ids"] for a in answers] == [e["output_ids"] for e in expected[:2]]
    assert answers[0]["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0
    assert answers[1]["meta_info"]["qspec"]["accepted_by_source"]["guess"] == 0


def test_guesses_may_be_token_ids(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    guess = expected[2]["output_ids"]
    custom = {"qspec_guess_ids": [guess[:8], guess]}
    answer = generate(server, prompts[2], custom_params=custom)
    assert answer["output_ids"] == expected[2]["output_ids"]
    assert answer["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0


def test_chat_and_completions_take_guesses_too(
    server: Server, expected: list[dict[str, Any]], prompts: list[str]
) -> None:
    guess = expected[3]["text"]
    for content in (
        tagged(PROMPTS[3], guess),
        [{"type": "text", "text": tagged(PROMPTS[3], guess)}],
    ):
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
        }
        answer = server.post("/v1/chat/completions", chat)
        assert answer["choices"][0]["message"]["content"] == guess
        assert answer["usage"]["prompt_tokens"] == expected[3]["meta_info"]["prompt_tokens"]
    completion = {
        "model": "m",
        "prompt": tagged(prompts[3], guess),
        "echo": True,
        "temperature": 0,
        "max_tokens": MAX_NEW_TOKENS,
    }
    assert server.post("/v1/completions", completion)["choices"][0]["text"] == prompts[3] + guess
    both = server.post(
        "/v1/completions", {**completion, "prompt": [completion["prompt"], prompts[0]]}
    )
    assert [choice["text"] for choice in both["choices"]] == [
        prompts[3] + guess,
        prompts[0] + expected[0]["text"],
    ]
    assert both["usage"]["prompt_tokens"] == sum(
        expected[index]["meta_info"]["prompt_tokens"] for index in (3, 0)
    )


def test_guesses_are_counted_as_the_client_sent_them(
    server: Server, prompts: list[str], expected: list[dict[str, Any]]
) -> None:
    """The server keeps each guess in two spacings, and counts it once."""
    guesses = [f"nothing like it {number}" for number in range(63)] + [expected[1]["text"]]
    tags = "".join(f"<NGRAMGUESS>{guess}</NGRAMGUESS>" for guess in guesses)
    last: dict[str, Any] = {"qspec_guess_ids": expected[1]["output_ids"]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (prompts[1] + tags, {}),
        (prompts[1], {"qspec_guesses": guesses}),
        (prompts[1], {"qspec_guesses": guesses[:63], **last}),
    ]
    for text, custom in bodies:
        answer = generate(server, text, custom_params=custom)
        assert answer["output_ids"] == expected[1]["output_ids"]
        assert answer["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0
    for text, custom in (
        (prompts[1] + tags, {"qspec_guess_ids": [1]}),
        (prompts[1], {"qspec_guesses": [*guesses, "one more"]}),
        (prompts[1], {"qspec_guesses": guesses, "qspec_guess_ids": [1]}),
    ):
        with pytest.raises(ServerError, match="HTTP 400.*there are 65 guesses; at most 64"):
            generate(server, text, custom_params=custom)


@pytest.mark.parametrize("guess", ["word " * 3000, "word " * 5000, "    indented " * 2000])
def test_the_tokens_of_guesses_are_counted_as_the_client_sent_them(
    server: Server, guess: str
) -> None:
    size = server.post("/tokenize", {"model": "m", "prompt": guess, "add_special_tokens": False})
    body = {"model": "m", "prompt": f"<NGRAMGUESS>{guess}</NGRAMGUESS>Hello", "max_tokens": 1}
    if size["count"] <= 4096:
        assert server.post("/v1/completions", body)["usage"]["prompt_tokens"] == 1
        return
    with pytest.raises(ServerError, match=f"have {size['count']} tokens together; at most 4096"):
        server.post("/v1/completions", body)
