"""A streamed answer has the same text and tool calls, whatever the number of tokens in a piece."""

import copy
import inspect
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_qspec.engine.frontend import tool_calls
from sglang_qspec.tools.models import DemoModels

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = [
    Tool(type="function", function=Function(name=name, parameters=SCHEMA))
    for name in ("weather", "time")
]
PARIS, ROME = {"city": "Paris, 巴黎 🗼", "days": 12}, {"city": "Rome", "days": 3}
CALLS = (("weather", PARIS), ("time", ROME))
SAID = "Let me look."


def in_json(key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: given}, ensure_ascii=False) for name, given in CALLS]


def arguments(form: str, between: str = "") -> str:
    """The calls, each in the form of `%s` (name) and `%s` (arguments as JSON)."""
    return between.join(form % (name, json.dumps(v, ensure_ascii=False)) for name, v in CALLS)


def in_tags(call: str, argument: str, between: str) -> str:
    """The calls, each in the form `call` of its name and its arguments in the form `argument`."""
    return between.join(
        call % (name, "".join(argument % pair for pair in given.items())) for name, given in CALLS
    )


HERMES = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in in_json())
ANSWERS = {
    "qwen": f"{SAID}\n{HERMES}",
    "hermes": f"{SAID}\n{HERMES}",
    "llama3": "<|python_tag|>" + ";".join(in_json("parameters")),
    "mistral": f"{SAID}[TOOL_CALLS] [{in_json()[0]}]",
    "deepseekv3": SAID
    + "<｜tool▁calls▁begin｜>"
    + arguments(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>", "\n"
    )
    + "<｜tool▁calls▁end｜>",
    "deepseekv31": SAID
    + "<｜tool▁calls▁begin｜>"
    + arguments("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "pythonic": '[weather(city="Paris, 巴黎 🗼", days=12), time(city="Rome", days=3)]',
    "kimi_k2": SAID
    + "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{json.dumps(given, ensure_ascii=False)}<|tool_call_end|>"
        for number, (name, given) in enumerate(CALLS)
    )
    + "<|tool_calls_section_end|>",
    "glm45": f"{SAID}\n"
    + in_tags(
        "<tool_call>%s%s\n</tool_call>",
        "\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>",
        "",
    ),
    "glm47": SAID
    + in_tags("<tool_call>%s%s</tool_call>", "<arg_key>%s</arg_key><arg_value>%s</arg_value>", ""),
    "qwen3_coder": f"{SAID}\n"
    + in_tags(
        "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>",
        "<parameter=%s>\n%s\n</parameter>\n",
        "\n",
    ),
    "minimax-m2": f"{SAID}\n<minimax:tool_call>\n"
    + in_tags('<invoke name="%s">\n%s</invoke>', '<parameter name="%s">%s</parameter>\n', "\n")
    + "\n</minimax:tool_call>",
    "step3": f"{SAID}<｜tool_calls_begin｜>"
    + in_tags(
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="%s">%s</steptml:invoke><｜tool_call_end｜>',
        '<steptml:parameter name="%s">%s</steptml:parameter>',
        "",
    )
    + "<｜tool_calls_end｜>",
    "interns1": f"{SAID}<|action_start|> <|plugin|>\n{in_json('parameters')[0]}\n<|action_end|>",
    "lfm2": f'{SAID}<|tool_call_start|>[weather(city="Rome", days=3)]<|tool_call_end|>',
    "gpt-oss": "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.weather<|constrain|>json<|message|>"
    + json.dumps(PARIS, ensure_ascii=False)
    + "<|call|>",
}
"""By parser: an answer with a text and calls, as its models write it."""
SPECIAL = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
    ),
    *("<｜tool▁sep｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>"),
    *("</minimax:tool_call>", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_sep｜>"),
    *("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<|action_start|>", "<|action_end|>"),
    *("<|plugin|>", "<|tool_call_start|>", "<|channel|>", "<|message|>", "<|end|>"),
    *("<|start|>", "<|constrain|>", "<|call|>"),
]
"""Tokens that models have for these answers."""


@pytest.fixture(scope="module")
def tokenizer(models: DemoModels) -> Any:
    tokenizer = copy.deepcopy(get_tokenizer(str(models.target)))
    tokenizer.add_tokens(SPECIAL)
    return tokenizer


@pytest.fixture
def _served(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of SGLang's HTTP server in this process."""
    args = SimpleNamespace(speculative_algorithm="QSPEC")
    manager = SimpleNamespace(server_args=args, tokenizer=tokenizer)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))


class Client:
    """Adds up a stream, as a client does."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, list[str]] = {}

    def take(self, text: str | None, parts: Iterable[Any]) -> None:
        self.text += text or ""
        for part in parts:
            call = self.calls.setdefault(part.tool_index, ["", ""])
            call[0] += part.name or ""
            call[1] += part.parameters or ""

    def outcome(self) -> tuple[str, list[tuple[str, Any]]]:
        return self.text, [(name, json.loads(given)) for name, given in self.calls.values()]


def stream(name: str, pieces: Sequence[str], tokenizer: Any) -> Client:
    """The stream of an answer in these pieces, through QSPEC's hook."""
    parser, client = FunctionCallParser(TOOLS, name, tokenizer=tokenizer), Client()
    # Another test may have loaded the plugin, which wraps it.
    parse = inspect.unwrap(FunctionCallParser.parse_stream_chunk)
    for piece in pieces:
        client.take(*tool_calls.parse_stream_chunk(parse, parser, piece))
    client.take(*parser.parse_stream_end())
    return client


def divided(tokens: Sequence[str], ends: Sequence[int]) -> list[str]:
    """The answer in pieces that end after these numbers of tokens."""
    bounds = sorted({0, *(end for end in ends if end < len(tokens)), len(tokens)})
    return ["".join(tokens[a:b]) for a, b in pairwise(bounds)]


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize("name", ANSWERS)
def test_any_division_of_an_answer_gives_the_same_stream(name: str, tokenizer: Any) -> None:
    tokens = tool_calls.token_texts(tokenizer, ANSWERS[name])
    assert len(tokens) > 15
    expected = stream(name, tokens, tokenizer).outcome()
    assert expected[1][0][0] == "weather"

    @settings(max_examples=60)
    @given(st.lists(st.integers(1, len(tokens)), max_size=len(tokens)))
    def check(ends: list[int]) -> None:
        assert stream(name, divided(tokens, ends), tokenizer).outcome() == expected

    check()
    assert stream(name, [ANSWERS[name]], tokenizer).outcome() == expected


@pytest.mark.usefixtures("_served")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
def test_calls_that_the_client_requires_come_whole(size: int, tokenizer: Any) -> None:
    answer = f"[{', '.join(in_json('parameters'))}]"
    tokens = tool_calls.token_texts(tokenizer, answer)
    parser, client = JsonArrayParser(), Client()
    parse = inspect.unwrap(JsonArrayParser.parse_streaming_increment)
    for piece in divided(tokens, range(size, len(tokens), size)):
        result = tool_calls.parse_array(parse, parser, piece, TOOLS)
        client.take(result.normal_text, result.calls)
    client.take("", parser.finish(TOOLS).calls)
    assert client.outcome()[1] == list(CALLS)


@pytest.mark.usefixtures("_served")
def test_the_parts_of_a_call_in_one_piece_are_few(tokenizer: Any) -> None:
    parse = inspect.unwrap(FunctionCallParser.parse_stream_chunk)
    parser = FunctionCallParser(TOOLS, "qwen", tokenizer=tokenizer)
    _, parts = tool_calls.parse_stream_chunk(parse, parser, ANSWERS["qwen"])
    assert [part.name for part in parts] == ["weather", None, "time", None]


class Slow:
    """A tokenizer without offsets, with a token for each two bytes of UTF-8."""

    def encode(self, text: str, add_special_tokens: bool) -> list[bytes]:
        data = text.encode()
        return [data[at : at + 2] for at in range(0, len(data), 2)]

    def decode(self, ids: Sequence[bytes]) -> str:
        return b"".join(ids).decode("utf-8", "replace")


def test_a_tokenizer_without_offsets_gives_pieces_of_whole_characters() -> None:
    assert tool_calls.token_texts(Slow(), "ab你好c🗼de") == ["ab", "你好", "c🗼d", "e"]
    assert tool_calls.token_texts(Slow(), "a") == ["a"]
