"""All forms of requests: batches, several answers, streams, chat with tools and with reasoning."""

import json
import re
from typing import Any

import pytest

from benchmark.harness.server import Server
from test.engine.features.asking import PLAIN, TEXT, ask, both, check_same, guessing

pytestmark = pytest.mark.server

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WIDTH_3, WIDTH_8 = {"qspec_draft_token_num": 3}, {"qspec_draft_token_num": 8}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "London"]}},
            "required": ["city"],
        },
    },
}


def test_text_and_token_ids_give_the_same(server: Server, story: dict[str, Any]) -> None:
    prompt_ids = server.post("/tokenize", {"model": "m", "prompt": TEXT})["tokens"]
    custom = guessing(story["output_ids"])
    answer = ask(server, {"max_new_tokens": 32, "custom_params": custom}, input_ids=prompt_ids)
    assert answer["output_ids"] == story["output_ids"]
    assert answer["meta_info"]["qspec"]["accepted_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("number", [1, 3])
def test_openai_streams_add_up_to_the_plain_answer(server: Server, path: str, number: int) -> None:
    prompt = {"prompt": TEXT} if path == "/v1/completions" else {"messages": QUESTION}
    body = {"model": "m", "temperature": 0, "max_tokens": 24, "n": number, **prompt}
    plain = server.post(path, {**body, "custom_params": PLAIN})
    expected = [text_of(choice) for choice in plain["choices"]]
    ids = server.post("/tokenize", {"model": "m", "prompt": expected[0]})["tokens"]
    custom = {"custom_params": guessing(ids)}
    whole = server.post(path, {**body, **custom})
    assert [text_of(choice) for choice in whole["choices"]] == expected
    assert whole["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    pieces = ["" for _ in expected]
    for piece in server.stream(path, {**body, **custom, "stream": True}):
        for choice in piece["choices"]:
            pieces[choice["index"]] += text_of(choice)
    assert pieces == expected


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, or of a piece of it, reasoning included."""
    message = choice.get("message") or choice.get("delta") or {}
    parts = (choice.get("text"), message.get("reasoning_content"), message.get("content"))
    return "".join(part for part in parts if part)


def test_a_stream_of_several_answers_to_several_prompts_keeps_them_apart(server: Server) -> None:
    texts = [TEXT, "One, two, three,"]
    sampling = {"temperature": 0, "max_new_tokens": 16, "n": 2}
    plain = ask(server, {**sampling, "custom_params": PLAIN}, text=texts)
    last: dict[int, dict[str, Any]] = {}
    custom = {"custom_params": guessing(plain[0]["output_ids"])}
    body = {"text": texts, "sampling_params": {**sampling, **custom}, "stream": True}
    for piece in server.stream("/generate", body):
        last[piece["index"]] = piece
    assert [last[index]["text"] for index in sorted(last)] == [a["text"] for a in plain]


def test_answers_to_one_prompt_with_a_seed_differ_and_can_be_had_again(server: Server) -> None:
    seeded = {"temperature": 1.0, "max_new_tokens": 16, "sampling_seed": 7}
    first = ask(server, seeded)["output_ids"]
    for sampling, text in (({**seeded, "n": 3}, TEXT), (seeded, [TEXT] * 3)):
        answers = [ask(server, sampling, text=text) for _ in range(2)]
        once, again = ([answer["output_ids"] for answer in each] for each in answers)
        assert once == again
        assert once[0] == first
        assert len(set(map(tuple, once))) == 3


SEEDED: dict[str, dict[str, Any]] = {
    "/generate": {
        "input_ids": [504, 338, 504, 338, 504],
        "sampling_params": {"sampling_seed": 7, "max_new_tokens": 8},
    },
    "/v1/completions": {"prompt": [504, 338, 504, 338, 504], "seed": 7, "max_tokens": 8},
    "/v1/chat/completions": {"messages": QUESTION, "seed": 7, "max_tokens": 8},
    "/api/chat": {"messages": QUESTION, "stream": False, "options": {"seed": 7, "num_predict": 8}},
}


@pytest.mark.parametrize("path", SEEDED)
def test_a_seed_gives_the_same_answer_again_to_prompts_with_repeated_tokens(
    server: Server, path: str
) -> None:
    def answer() -> list[str]:
        said = server.post(path, {"model": "m", **SEEDED[path]})
        return re.findall(r'"(?:text|(?:reasoning_)?content)": "([^"]+)"', json.dumps(said))

    first = answer()
    assert first
    assert answer() == first


@pytest.mark.parametrize(
    "wanted", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_a_tool_is_called_as_without_drafts(server: Server, wanted: Any) -> None:
    body = {
        "model": "m",
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": wanted,
        "temperature": 0,
        "max_tokens": 48,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    plain = server.post("/v1/chat/completions", {**body, "custom_params": PLAIN})
    calls = plain["choices"][0]["message"]["tool_calls"]
    text = json.dumps([{"name": "get_weather", "parameters": {"city": "Paris"}}])
    ids = server.post("/tokenize", {"model": "m", "prompt": text})["tokens"]
    ours = server.post("/v1/chat/completions", {**body, "custom_params": guessing(ids)})
    mine = ours["choices"][0]["message"]["tool_calls"]
    assert [call["function"] for call in mine] == [call["function"] for call in calls]
    assert mine[0]["function"]["name"] == "get_weather"
    arguments = ""
    for piece in server.stream("/v1/chat/completions", {**body, "stream": True}):
        for choice in piece["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                arguments += call["function"]["arguments"] or ""
    assert json.loads(arguments) == json.loads(mine[0]["function"]["arguments"])


def test_a_streamed_tool_call_after_a_text_is_whole(server: Server) -> None:
    """A pass accepts the end of the text, and the beginning of a call, in one run."""
    call = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    text = f"I look.\n<tool_call>\n{call}\n</tool_call>"
    ids = server.post("/tokenize", {"model": "m", "prompt": text})["tokens"]
    body = {
        "model": "m",
        "messages": QUESTION,
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 48,
        "regex": re.escape(text),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for custom in (PLAIN, *({"qspec_guess_ids": ids, **w} for w in (WIDTH_3, WIDTH_8))):
        said, name, arguments = "", "", ""
        asked = {**body, "stream": True, "custom_params": custom}
        for piece in server.stream("/v1/chat/completions", asked):
            for choice in piece["choices"]:
                said += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls") or ():
                    name += part["function"]["name"] or ""
                    arguments += part["function"]["arguments"] or ""
        assert (said.strip(), name) == ("I look.", "get_weather")
        assert json.loads(arguments) == {"city": "Rome"}


def test_reasoning_is_separated_from_the_answer_as_without_drafts(server: Server) -> None:
    """A grammar makes the answer begin where the reasoning ends."""
    body = {
        "model": "m",
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 40,
        "regex": "<think>[a-z ]{4,12}</think>(yes|no)",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for separate in (True, False):
        asked = {**body, "separate_reasoning": separate}
        answers = [
            server.post("/v1/chat/completions", {**asked, "custom_params": custom})
            for custom in (PLAIN, guessing([44, 1099, 46, 355]))
        ]
        plain, ours = (answer["choices"][0]["message"] for answer in answers)
        assert ours["content"] == plain["content"]
        assert ours["reasoning_content"] == plain["reasoning_content"]


def test_a_session_continues_from_its_own_answer(server: Server) -> None:
    """Compares the turns of a session with drafts and of a session without drafts."""
    sessions = []
    for custom in (PLAIN, guessing([28, 260, 2])):
        session = server.post("/open_session", {"capacity_of_str_len": 4096})
        turns, last = [], None
        for text in ("Let me tell you about France.", " Its capital is", " And then"):
            ids = server.post("/tokenize", {"model": "m", "prompt": text})["tokens"]
            params = {"id": session, "rid": last}
            sampling = {"max_new_tokens": 12, "custom_params": custom}
            answer = ask(server, sampling, input_ids=ids, session_params=params)
            last = answer["meta_info"]["id"]
            turns.append((answer["output_ids"], answer["meta_info"]["prompt_tokens"]))
        server.post("/close_session", {"session_id": session})
        sessions.append(turns)
    assert sessions[1] == sessions[0]
    assert sessions[0][2][1] > sessions[0][1][1] > sessions[0][0][1]


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 1.6},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"logit_bias": {"260": -100.0, "253": 4.0}},
        {"frequency_penalty": 0.3, "min_new_tokens": 10, "logit_bias": {"2": 20.0}},
    ],
    ids=str,
)
def test_penalties_and_biases_act_as_without_drafts(
    server: Server, story: dict[str, Any], sampling: dict[str, Any]
) -> None:
    plain, ours = both(server, {"max_new_tokens": 24, **sampling})
    check_same(plain, ours, accepted=False)
    assert ours["output_ids"] != story["output_ids"][:24]


def test_a_custom_logit_processor_acts_as_without_drafts(
    server: Server, story: dict[str, Any]
) -> None:
    import sglang_qspec  # noqa: F401, I001  first: it installs the CPU stand-ins
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    banned = story["output_ids"][3]
    sampling = {"max_new_tokens": 16, "custom_params": {"token_ids": [banned]}}
    processor = DisallowedTokensLogitsProcessor.to_str()
    plain, ours = both(server, sampling, story["output_ids"], custom_logit_processor=processor)
    check_same(plain, ours, accepted=False)
    assert banned not in ours["output_ids"]
