"""Puts the pieces of a streamed answer together to what the server sends without streaming."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_qspec.errors import AnswerError
from sglang_qspec.tools.batch.line import CHAT
from sglang_qspec.tools.guesses.guess import Guess, guess_of

_DATA = b"data:"
_DONE = b"[DONE]"
USAGE_DETAILS = ("prompt_tokens_details", "completion_tokens_details")
"""Figures that the usage of a streamed completion lacks where they are null."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[_Choice] = []
    usage: Any = None
    sglext: Any = None
    error: Any = None


class PartsError(AnswerError):
    """A piece has more than a text, so the answer must come without streaming."""


class StreamedAnswer:
    """The answer of one request, as far as its pieces have come."""

    def __init__(self, url: str, weight_version: str | None) -> None:
        """`url` is the endpoint, and `weight_version` what the answer says of the weights."""
        self._is_chat = url == CHAT
        self._weight_version = weight_version
        self._text: list[str] = []
        self._chunk = _Chunk()
        """Id, time and model of the answer."""
        self._end: _Choice | None = None
        """The piece with the reason of the end."""
        self._usage: Any = None
        self._sglext: Any = None
        self._error: Any = None
        self._is_complete = False
        """Whether the last piece has come."""

    def take(self, line: bytes) -> int:
        """Add a line of the response; returns how many characters of text it has.

        Raises AnswerError for a line that is no piece of such an answer, and PartsError.
        """
        if not line.startswith(_DATA):
            return 0
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            self._is_complete = True
            return 0
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise AnswerError("has a piece that is not JSON of the endpoint") from None
        if chunk.id is not None:
            self._chunk = chunk
        self._usage = chunk.usage or self._usage
        self._sglext = chunk.sglext or self._sglext
        self._error = chunk.error or self._error
        return sum(map(self._take, chunk.choices))

    def _take(self, choice: _Choice) -> int:
        delta = choice.delta or _Delta()
        if choice.index or delta.tool_calls or delta.reasoning_content or choice.logprobs:
            raise PartsError("has pieces with more than a text")
        if choice.finish_reason is not None:
            self._end = choice
        text = delta.content if self._is_chat else choice.text
        if text:
            self._text.append(text)
        return len(text or "")

    @property
    def was_cut(self) -> bool:
        """Whether the server has not finished the answer."""
        ended = self._end is not None and self._end.finish_reason != "abort"
        return not (ended and self._is_complete)

    @property
    def guess(self) -> Guess:
        """The text so far, as a guess for another attempt."""
        text = "".join(self._text)
        self._text = [text]
        return guess_of(text, _count(self._usage, "completion_tokens"))

    def response(self) -> tuple[int, bytes]:
        """HTTP status and body of the same answer without streaming. Raises AnswerError."""
        if self._error is not None:
            return _count(self._error, "code") or 500, msgspec.json.encode(self._error)
        if self._end is None or not self._is_complete:
            raise AnswerError("ended early")
        return 200, msgspec.json.encode(self._body(self._end))

    def _body(self, end: _Choice) -> dict[str, Any]:
        text = "".join(self._text)
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            message = {"role": "assistant", "content": text, "reasoning_content": None}
            choice["message"] = message
        else:
            choice["text"] = text
        choice["logprobs"] = None
        choice |= {"finish_reason": end.finish_reason, "matched_stop": end.matched_stop}
        usage = self._usage
        if isinstance(usage, dict):
            usage = {**usage, **{key: usage.get(key) for key in USAGE_DETAILS}}
        version = self._weight_version
        body = {
            "id": self._chunk.id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": self._chunk.created,
            "model": self._chunk.model,
            "choices": [choice],
            "usage": usage,
            "metadata": None if version is None else _versions(version, usage),
        }
        return body if self._sglext is None else {**body, "sglext": self._sglext}


def _versions(version: str, usage: Any) -> dict[str, Any]:
    """What an answer says of the weights of the target, if they have not changed meanwhile."""
    span = {"version": version, "start": 0, "end": _count(usage, "completion_tokens")}
    return {"weight_version": version, "weight_versions": [span]}


def _count(fields: Any, name: str) -> int:
    """A count in an object of a stream; 0 if there is none."""
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) and value > 0 else 0
