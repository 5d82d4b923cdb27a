"""The stream of each endpoint adds up to its whole answer, in scripts that need several tokens for
a character."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmark.harness.server import Server
from test.engine.features.asking import ask

pytestmark = pytest.mark.server

TEXTS = ("日本語、例えば「猫」と「犬」です。", "我喜欢🐱和🐶，你呢？", "世界안녕 हिन्दी ภาษา é🇯🇵")
PROMPT = "Repeat after me: 你好, naïve 🙂🙂! 你好, naïve 🙂🙂! 你好, naïve"


def pieces(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a stream of events, or of lines, as Ollama's are."""
    url = server.url + path
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=600) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            line = line.removeprefix("data:").strip()
            if line.startswith("{"):
                yield json.loads(line)


def forced(server: Server, text: str) -> list[int]:
    """The tokens in which the target writes a text that a grammar demands, after "Say: "."""
    sampling = {"regex": re.escape(text), "max_new_tokens": 90}
    ids: list[int] = ask(server, sampling, text="Say: ")["output_ids"]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_repeats_no_character(server: Server, text: str) -> None:
    ids = forced(server, text)
    sampling = {"temperature": 0, "max_new_tokens": 90, "regex": re.escape(text)}
    for width, interval in ((8, 1), (2, 1), (3, 2), (5, 1), (7, 3)):
        custom = {"qspec_guess_ids": ids, "qspec_draft_token_num": width}
        given = {**sampling, "custom_params": custom, "stream_interval": interval}
        *_, last = pieces(server, "/generate", {"text": "Say: ", "sampling_params": given})
        assert (last["text"], last["output_ids"]) == (text, ids)
        assert last["meta_info"]["qspec"]["accepted_tokens"] > 0
        for stop in (text[4], text[3:5]):
            whole = ask(server, {**given, "stop": stop}, text="Say: ")
            assert whole["text"] == text[: text.index(stop)]
            stopping = {"text": "Say: ", "sampling_params": {**given, "stop": stop}}
            texts = [piece["text"] for piece in pieces(server, "/generate", stopping)]
            assert texts[-1] == whole["text"]
            assert all(whole["text"].startswith(one) for one in texts)


def test_a_stream_of_a_completion_repeats_no_character(server: Server) -> None:
    for text in TEXTS:
        custom = {"qspec_guess_ids": forced(server, text)}
        body = {"model": "m", "temperature": 0, "max_tokens": 90, "regex": re.escape(text)}
        body |= {"prompt": "Say: ", "custom_params": custom}
        streamed = pieces(server, "/v1/completions", body)
        assert "".join(piece["choices"][0]["text"] for piece in streamed) == text


def text_of(part: Any) -> str:
    """The text of a part of an answer, reasoning included; empty if it has none."""
    if isinstance(part, str):
        return part
    keys = ("text", "thinking", "content", "reasoning_content", "response", "delta")
    return "".join(found for key in keys if isinstance(found := part.get(key), str))


def messages(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


OPTIONS = {"options": {"temperature": 0, "num_predict": 24}}
OTHERS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[..., Any], Callable[..., Any]]]
OTHERS = {
    "/v1/chat/completions": (
        lambda prompt: {"max_tokens": 24, "temperature": 0, **messages(prompt)},
        lambda answer: text_of(answer["choices"][0]["message"]),
        lambda piece: "".join(text_of(choice["delta"]) for choice in piece["choices"]),
    ),
    "/v1/messages": (
        lambda prompt: {"max_tokens": 24, "temperature": 0, **messages(prompt)},
        lambda answer: "".join(map(text_of, answer["content"])),
        lambda piece: text_of(piece.get("delta") or {}),
    ),
    "/v1/responses": (
        lambda prompt: {"input": prompt, "max_output_tokens": 24, "temperature": 0},
        lambda answer: "".join(text_of(c) for one in answer["output"] for c in one["content"]),
        lambda piece: text_of(piece) if piece["type"].endswith("text.delta") else "",
    ),
    "/api/chat": (
        lambda prompt: {**messages(prompt), **OPTIONS},
        lambda answer: text_of(answer["message"]),
        lambda piece: text_of(piece["message"]),
    ),
    "/api/generate": (lambda prompt: {"prompt": prompt, **OPTIONS}, text_of, text_of),
}
"""By path: the body for a prompt, the text of a whole answer, and the text of a piece."""


@pytest.mark.parametrize("path", OTHERS)
def test_the_streams_of_other_endpoints_repeat_no_character(server: Server, path: str) -> None:
    body, of_answer, of_piece = OTHERS[path]
    named = {"model": server.get("/v1/models")["data"][0]["id"]}
    whole = of_answer(server.post(path, {**named, "stream": False, **body(PROMPT)}))
    assert whole
    tagged = f"{PROMPT}<NGRAMGUESS>{whole}</NGRAMGUESS>"
    assert "".join(map(of_piece, pieces(server, path, {**named, **body(tagged)}))) == whole
