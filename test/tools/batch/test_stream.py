"""The pieces of a streamed answer become the answer that is not streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_qspec.errors import AnswerError
from sglang_qspec.tools.batch.line import CHAT, PLAIN
from sglang_qspec.tools.batch.stream import PartsError, StreamedAnswer
from sglang_qspec.tools.guesses.guess import Guess
from test.tools.batch.fake_server import HALF, answer, pieces

BODIES: dict[str, dict[str, Any]] = {
    PLAIN: {"prompt": "a", "return_spec_tokens_details": True},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


def taken(url: str, *lines: bytes) -> StreamedAnswer:
    found = StreamedAnswer(url, "default")
    for line in lines:
        found.take(line)
    return found


@pytest.mark.parametrize("url", [PLAIN, CHAT])
def test_the_answer_has_all_fields_of_one_that_is_not_streamed(url: str) -> None:
    whole = answer(BODIES[url])
    status, data = taken(url, *pieces(answer(BODIES[url]))).response()
    found = json.loads(data)
    assert status == 200
    assert (found.pop("object"), found.pop("created")) == (
        "chat.completion" if url == CHAT else "text_completion",
        None,
    )
    (choice,), (expected,) = found.pop("choices"), whole.pop("choices")
    if url == CHAT:
        expected["message"]["reasoning_content"] = None
    assert choice == {**expected, "logprobs": None, "matched_stop": None}
    usage = found.pop("usage")
    assert usage.pop("prompt_tokens_details") is usage.pop("completion_tokens_details") is None
    assert usage == whole.pop("usage")
    assert found == whole


def test_a_cut_answer_is_a_guess_with_its_tokens_and_no_answer() -> None:
    first, *_ = pieces(answer(BODIES[PLAIN]))
    found = taken(PLAIN, first)
    assert found.guess == Guess("answer ca978", HALF)
    assert found.was_cut
    with pytest.raises(AnswerError, match="ended early"):
        found.response()


def test_without_the_last_line_an_answer_is_cut() -> None:
    found = taken(PLAIN, *pieces(answer(BODIES[PLAIN]))[:-1])
    assert found.was_cut
    with pytest.raises(AnswerError, match="ended early"):
        found.response()


def test_an_aborted_answer_is_cut_and_a_finished_one_is_not() -> None:
    assert not taken(PLAIN, *pieces(answer(BODIES[PLAIN]))).was_cut
    aborted = taken(PLAIN, *pieces(answer({"prompt": "abort"})))
    assert aborted.was_cut
    assert aborted.response()[0] == 200


def test_an_error_in_a_stream_is_a_response_with_its_status() -> None:
    error = {"message": "out of memory", "code": 503}
    found = taken(PLAIN, b"data: " + json.dumps({"error": error}).encode(), b"data: [DONE]")
    status, data = found.response()
    assert (status, json.loads(data)) == (503, error)


@pytest.mark.parametrize(
    "delta",
    [{"tool_calls": [{}]}, {"reasoning_content": "Hm"}],
    ids=["tool call", "reasoning"],
)
def test_pieces_with_more_than_a_text_are_refused(delta: dict[str, Any]) -> None:
    piece = {"choices": [{"index": 0, "delta": delta}]}
    with pytest.raises(PartsError):
        taken(CHAT, b"data: " + json.dumps(piece).encode())


@pytest.mark.parametrize(
    "line",
    [b"data: {", b"data: []", b'data: {"choices": 7}', b"data: " + b"[" * 5000 + b"]" * 5000,
     b'data: {"choices": [{"text": "\\ud800"}]}', b'data: {"choices": [{"text": "\xff"}]}'],
    ids=range(6),
)  # fmt: skip
def test_a_strange_piece_is_an_error(line: bytes) -> None:
    with pytest.raises(AnswerError):
        taken(PLAIN, line)


def test_other_lines_are_ignored() -> None:
    assert taken(PLAIN, b"", b": comment", b"event: x").guess.text == ""
