"""The texts that are searched for tags, in the message forms of SGLang's endpoints."""

from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessage
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_qspec.engine.frontend.tags import TagReader
from sglang_qspec.errors import GuessError
from sglang_qspec.guess_tags import GuessLimits

TAGGED = "a<NGRAMGUESS>x</NGRAMGUESS>b"
ROLES = ("system", "user", "assistant", "tool")


def chat(content: Any) -> list[Any]:
    """A message of every role with this content."""
    messages = [
        {"role": role, "content": content, **({"tool_call_id": "1"} if role == "tool" else {})}
        for role in ROLES
    ]
    parsed: list[Any] = ChatCompletionRequest(model="m", messages=messages).messages
    return parsed


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("where", "read"), [("user", ["user"]), ("everywhere", list(ROLES))], ids=str
)
@pytest.mark.parametrize("content", [TAGGED, [part(TAGGED), part("c")]], ids=("text", "parts"))
def test_the_setting_says_in_which_messages_tags_are_read(
    where: str, read: list[str], content: Any
) -> None:
    reader = TagReader(where, GuessLimits())
    given = chat(content)
    expected = [message.model_dump() for message in given]
    for message in expected:
        if message["role"] in read:
            if isinstance(content, str):
                message["content"] = "ab"
            else:
                message["content"][0]["text"] = "ab"
    assert [message.model_dump() for message in reader.messages(given)] == expected
    assert reader.guesses == ["x"] * len(read)
    assert [message.model_dump() for message in chat(content)] == [
        message.model_dump() for message in given
    ], "the request of the client was changed"


@pytest.mark.parametrize("where", ["user", "everywhere"])
def test_a_pair_is_never_read_over_two_parts(where: str) -> None:
    with pytest.raises(GuessError, match="never closed"):
        TagReader(where, GuessLimits()).messages(
            chat([part("Name: Bob<NGRAMGUESS>"), part("</NGRAMGUESS>")])
        )


def test_tags_in_tool_and_search_results_are_read_only_under_everywhere() -> None:
    blocks: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": "1", "content": TAGGED},
        {"type": "tool_result", "tool_use_id": "2", "content": [part(TAGGED)]},
        {"type": "search_result", "source": "s", "title": "t", "content": [part(TAGGED)]},
    ]
    message = AnthropicMessage(role="user", content=[*blocks, part(TAGGED)])
    reader = TagReader("user", GuessLimits())
    (stripped,) = reader.messages([message])
    assert [block.model_dump() for block in stripped.content[:3]] == [
        block.model_dump() for block in message.content[:3]
    ]
    assert stripped.content[3].text == "ab"
    assert reader.guesses == ["x"]
    reader = TagReader("everywhere", GuessLimits())
    (stripped,) = reader.messages([message])
    assert "NGRAMGUESS" not in str(stripped.model_dump())
    assert reader.guesses == ["x"] * 4


def test_items_of_responses_are_read_as_dicts_and_not_changed() -> None:
    output = {"type": "function_call_output", "call_id": "1", "output": TAGGED}
    item = {"role": "user", "content": [{"type": "input_text", "text": TAGGED}]}
    plain = {"role": "user", "content": [{"type": "input_text", "text": "ab"}]}
    reader = TagReader("user", GuessLimits())
    assert reader.messages([item, output]) == [plain, output]
    assert item["content"] == [{"type": "input_text", "text": TAGGED}]
    reader = TagReader("everywhere", GuessLimits())
    assert reader.messages([item, output]) == [plain, {**output, "output": "ab"}]


def test_text_that_no_user_wrote_is_read_only_under_everywhere() -> None:
    assert TagReader("user", GuessLimits()).other(TAGGED) == TAGGED
    assert TagReader("everywhere", GuessLimits()).other(TAGGED) == "ab"
    assert TagReader("everywhere", GuessLimits()).other(None) is None
