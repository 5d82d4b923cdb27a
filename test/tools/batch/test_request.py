"""The request of a line: its guesses, and whether its answer is streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_qspec.guess_tags import GuessLimits
from sglang_qspec.tools.batch.abilities import Abilities, abilities_of
from sglang_qspec.tools.batch.line import CHAT, PLAIN, parse
from sglang_qspec.tools.batch.request import STREAM, request_of
from sglang_qspec.tools.guesses.guess import Guess

LIMITS = GuessLimits(3, 100)
ABLE = Abilities(frozenset({CHAT, PLAIN}), LIMITS)
GUESS = Guess("the answer", 4)
HI = [{"role": "user", "content": "Hi"}]


def sent(abilities: Abilities = ABLE, **fields: Any) -> dict[str, Any]:
    line = parse(1, json.dumps(fields).encode())
    body: dict[str, Any] = json.loads(request_of(line, [GUESS], abilities, stream=True).body)
    return body


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a"},
        {"prompt": [1, 2]},
        {"prompt": "a", "custom_params": None},
        {"messages": HI, "temperature": 0.5, "seed": 7},
    ],
)
def test_a_guess_stands_beside_the_prompt_and_the_answer_is_streamed(
    fields: dict[str, Any],
) -> None:
    body = sent(**fields)
    assert body.pop("custom_params") == {"qspec_guesses": ["the answer"]}
    assert body.pop("return_spec_tokens_details")
    assert {key: body.pop(key) for key in STREAM} == STREAM
    fields.pop("custom_params", None)
    assert body == fields


@pytest.mark.parametrize("own", ["mine", ["mine"]])
def test_guesses_of_the_line_come_first(own: Any) -> None:
    custom = {"qspec_guesses": own, "qspec_completions": 2}
    found = sent(prompt="<NGRAMGUESS>literal</NGRAMGUESS>", custom_params=custom)["custom_params"]
    assert found == {"qspec_guesses": ["mine", "the answer"], "qspec_completions": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a <NGRAMGUESS>b</NGRAMGUESS>"},
        {"messages": [{"role": "user", "content": "<NGRAMGUESS>b</NGRAMGUESS>"}]},
        {"prompt": ["a", "b"]},
        {"prompt": "a", "custom_params": 7},
        {"prompt": "a", "custom_params": {"qspec_guesses": 7}},
    ],
    ids=["tag", "tag in a chat", "several prompts", "no object", "no guess"],
)
def test_a_line_keeps_its_meaning_rather_than_get_a_guess(fields: dict[str, Any]) -> None:
    assert sent(**fields).get("custom_params") == fields.get("custom_params")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a", "logprobs": 1},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "echo": True},
        {"prompt": ["a", "b"]},
        {"messages": HI, "tools": []},
        {"messages": HI, "return_meta_info": True},
        {"messages": HI, "unknown": 1},
    ],
    ids=lambda fields: max(fields),
)
def test_an_answer_that_would_lose_a_part_is_not_streamed(fields: dict[str, Any]) -> None:
    assert not sent(**fields).keys() & STREAM.keys()


def test_a_request_without_guess_and_stream_is_the_line_itself() -> None:
    line = parse(1, b'{"prompt": "a"}')
    for guesses, abilities in (([], ABLE), ([GUESS], Abilities(ABLE.streams))):
        request = request_of(line, guesses, abilities, stream=False)
        assert request.body is line.body
        assert not request.guessed


def info(**fields: Any) -> dict[str, Any]:
    limits = {"guesses": 3, "tokens": 100}
    return {"internal_states": [{"qspec": {"guess_limits": limits}}], **fields}


def test_a_server_says_what_it_can() -> None:
    assert abilities_of(info(weight_version="v")) == Abilities(ABLE.streams, LIMITS, "v")


@pytest.mark.parametrize("parser", ["reasoning_parser", "tool_call_parser"])
def test_chats_that_a_server_divides_are_not_streamed(parser: str) -> None:
    assert abilities_of(info(**{parser: "qwen3"})).streams == {PLAIN}


ODD_LIMITS: tuple[Any, ...] = ({}, 7, [], {"guesses": -1, "tokens": 5}, {"guesses": "many"})


@pytest.mark.parametrize(
    "state", [{}, {"qspec": 7}, *({"qspec": {"guess_limits": limits}} for limits in ODD_LIMITS)]
)
def test_a_server_without_limits_gets_no_guesses(state: dict[str, Any]) -> None:
    assert abilities_of({"internal_states": [state]}).guesses is None


def test_a_request_for_responses_names_the_model_of_the_server_and_has_no_guesses() -> None:
    able = abilities_of(info(served_model_name="m"))
    assert sent(able, input="Hi") == {"input": "Hi", "model": "m"}
    assert sent(able, input="Hi", model="adapter") == {"input": "Hi", "model": "adapter"}
    assert sent(abilities_of(info(model_path="p")), input="Hi")["model"] == "p"
    assert "model" not in sent(able, prompt="Hi")
