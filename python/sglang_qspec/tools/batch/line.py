"""One line of the input: its formats, its checks, and the request that it becomes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sglang_qspec.errors import shown
from sglang_qspec.seeds import derived_seed
from sglang_qspec.tools.batch.digests import Digests

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
RESPONSES = "/v1/responses"
PROMPT_KEYS = {CHAT: "messages", PLAIN: "prompt", RESPONSES: "input"}
"""The key of the prompt in a request to each endpoint."""
LENGTH_KEYS = {
    CHAT: ("max_tokens", "max_completion_tokens"),
    PLAIN: ("max_tokens", "max_completion_tokens"),
    RESPONSES: ("max_output_tokens",),
}
"""The keys that limit the length of an answer of each endpoint; the first is the usual one."""
FORMAT_KEYS = frozenset({"method", "url", "body"})
"""Keys of OpenAI's batch format. A line without them has the keys of the request itself."""
FIGURES = "return_spec_tokens_details"
"""The key that asks SGLang for the figures of the request's passes."""
PREFIX_BYTES = 512
"""Length of the beginning of a prompt by which lines are sent to the same server."""
_ALLOWED = {
    CHAT: "a list of messages",
    PLAIN: "a text or a list of token ids",
    RESPONSES: "a text or a list of items",
}
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Line:
    """A request, checked as far as the client knows its rules."""

    number: int
    """Number of the line in the input, from 1."""
    custom_id: str
    url: str
    """Path of the endpoint: CHAT, PLAIN or RESPONSES."""
    body: bytes
    """JSON of the request. It begins with the prompt."""
    hides_figures: bool
    """Whether the answer loses the figures of its passes, because the line did not ask for them."""

    @property
    def prefix(self) -> bytes:
        """The beginning of the prompt."""
        return self.body[:PREFIX_BYTES]


def parse(number: int, text: bytes, max_tokens: int | None = None) -> Line:
    """Read a line of the input. Requests without a length get `max_tokens`, if that is given.

    Raises ValueError with a message that names the field, the value and what is allowed.
    """
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"is {shown(fields)}, but must be a JSON object")
    custom_id = fields.pop("custom_id", str(number))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id is {shown(custom_id)}, but must be a text")
    url, body = _request(fields)
    _check(url, body)
    if max_tokens is not None and not body.keys() & set(LENGTH_KEYS[url]):
        body[LENGTH_KEYS[url][0]] = max_tokens
    hides = FIGURES not in body
    if url != RESPONSES:  # which has no such key
        body.setdefault(FIGURES, True)
    key = PROMPT_KEYS[url]
    ordered = {key: body.pop(key), **body}
    return Line(number, custom_id, url, msgspec.json.encode(ordered), hides)


def reseeded(line: Line, seen: Digests) -> Line:
    """The line with another seed if one of the lines in `seen` asks the same with the same seed.

    The seed depends on the seed and the number of the line. Adds the line to `seen`.
    """
    if b'"seed":' not in line.body or seen.add(line.body.decode()):
        return line
    body = msgspec.json.decode(line.body)
    if not isinstance(body.get("seed"), int):
        return line
    body["seed"] = derived_seed(body["seed"], line.number)
    return replace(line, body=msgspec.json.encode(body))


def _request(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The endpoint and the body of a line without its custom_id. Raises ValueError."""
    if not fields.keys() & FORMAT_KEYS:
        given = [url for url, key in PROMPT_KEYS.items() if key in fields]
        if len(given) != 1:
            raise ValueError(
                "must have `prompt`, `messages` or `input`, or `method`, `url` and `body`"
            )
        return given[0], fields
    unknown = fields.keys() - FORMAT_KEYS
    if unknown:
        raise ValueError(f"{min(unknown)} is not a field of the format; put it into body")
    method, url, body = (fields.get(key) for key in ("method", "url", "body"))
    if method != "POST":
        raise ValueError(f"method is {shown(method)}, but must be 'POST'")
    if not isinstance(url, str) or url not in PROMPT_KEYS:
        *others, last = PROMPT_KEYS
        raise ValueError(f"url is {shown(url)}, but must be {', '.join(others)} or {last}")
    if not isinstance(body, dict):
        raise ValueError(f"body is {shown(body)}, but must be a JSON object")
    return url, body


def _check(url: str, body: dict[str, Any]) -> None:
    """Raise ValueError if a request has no prompt, or asks for a stream."""
    key = PROMPT_KEYS[url]
    prompt = body.get(key)
    is_text = isinstance(prompt, str) and _BLANK.fullmatch(prompt) is None and key != "messages"
    if not is_text and not (isinstance(prompt, list) and prompt):
        raise ValueError(f"{key} is {shown(prompt)}, but must be {_ALLOWED[url]}")
    for name in ("stream", "background"):  # with either the answer would not be the response
        if body.get(name):
            raise ValueError(f"{name} is {shown(body[name])}, but must be false")
