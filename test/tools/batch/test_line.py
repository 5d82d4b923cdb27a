"""The formats of an input line, and the request that it becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_qspec.tools.batch.line import CHAT, PLAIN, RESPONSES, Line, parse

MESSAGES = [{"role": "user", "content": "Hi"}]


def parsed(fields: Any, **options: Any) -> Line:
    return parse(7, json.dumps(fields).encode(), **options)


def body_of(line: Line) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(line.body)
    return body


def test_a_line_in_openai_s_format_is_sent_to_its_endpoint() -> None:
    body = {"model": "m", "messages": MESSAGES, "custom_params": {"qspec_guesses": ["x"]}}
    line = parsed({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})
    assert (line.number, line.custom_id, line.url) == (7, "a", CHAT)
    assert body_of(line) == {**body, "return_spec_tokens_details": True}


@pytest.mark.parametrize(
    ("fields", "url"),
    [({"prompt": "Hi"}, PLAIN), ({"prompt": [1, 2]}, PLAIN), ({"messages": MESSAGES}, CHAT)],
)
def test_a_short_line_has_the_keys_of_the_request(fields: dict[str, Any], url: str) -> None:
    line = parsed({**fields, "temperature": 0})
    assert (line.custom_id, line.url) == ("7", url)
    assert body_of(line) == {**fields, "temperature": 0, "return_spec_tokens_details": True}


def test_only_lines_without_a_length_get_the_maximum() -> None:
    assert body_of(parsed({"prompt": "Hi"}, max_tokens=9))["max_tokens"] == 9
    assert body_of(parsed({"prompt": "Hi", "max_tokens": 3}, max_tokens=9))["max_tokens"] == 3
    given = {"messages": MESSAGES, "max_completion_tokens": 3}
    assert "max_tokens" not in body_of(parsed(given, max_tokens=9))


def test_a_line_for_responses_gets_no_key_that_the_endpoint_lacks() -> None:
    line = parsed({"input": "Hi", "temperature": 0}, max_tokens=9)
    assert line.url == RESPONSES
    assert body_of(line) == {"input": "Hi", "temperature": 0, "max_output_tokens": 9}
    given = {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 3}
    assert body_of(parsed(given, max_tokens=9)) == given


def test_an_answer_keeps_the_figures_only_if_the_line_asks_for_them() -> None:
    assert parsed({"prompt": "Hi"}).hides_figures
    assert not parsed({"prompt": "Hi", "return_spec_tokens_details": True}).hides_figures


def test_the_prefix_is_the_beginning_of_the_prompt_wherever_the_prompt_is_in_the_line() -> None:
    text = "same beginning " * 60
    one = parsed({"custom_id": "a", "temperature": 0.1, "prompt": text + "one"})
    two = parsed({"prompt": text + "two", "temperature": 0.9})
    assert one.prefix == two.prefix
    assert one.prefix != parsed({"prompt": "other " + text}).prefix


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (7, "is 7, but must be a JSON object"),
        ({}, "must have `prompt`, `messages` or `input`, or `method`, `url` and `body`"),
        ({"prompt": "a", "messages": MESSAGES}, "must have `prompt`, `messages`"),
        ({"prompt": "a", "custom_id": 3}, "custom_id is 3, but must be a text"),
        ({"prompt": "a", "custom_id": ""}, "custom_id is '', but must be a text"),
        ({"prompt": " "}, "prompt is ' ', but must be a text or a list of token ids"),
        ({"prompt": []}, r"prompt is \[\], but must be"),
        ({"prompt": "a", "stream": True}, "stream is True, but must be false"),
        ({"input": "a", "background": True}, "background is True, but must be false"),
        ({"input": 7}, "input is 7, but must be a text or a list of items"),
        ({"messages": "a"}, "messages is 'a', but must be a list of messages"),
        ({"method": "POST", "url": PLAIN}, "body is None, but must be a JSON object"),
        ({"method": "POST", "url": PLAIN, "body": {}}, "prompt is None, but must be"),
        ({"method": "GET", "url": PLAIN, "body": {}}, "method is 'GET', but must be 'POST'"),
        (
            {"method": "POST", "url": "/v1/embeddings", "body": {}},
            "url is '/v1/embeddings', but must be /v1/chat/completions, /v1/completions or ",
        ),
        (
            {"method": "POST", "url": PLAIN, "body": {"prompt": "a"}, "seed": 1},
            "seed is not a field of the format; put it into body",
        ),
    ],
)
def test_a_bad_line_is_an_error_that_names_field_value_and_what_is_allowed(
    fields: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        parsed(fields)


@pytest.mark.parametrize("text", [b"{", b"\xff", b'{"prompt": "\xff"}'])
def test_a_line_that_is_not_json_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        parse(1, text)
