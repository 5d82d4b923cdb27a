"""What clients take from a server that they do not trust: bounded JSON, and text without controls.

The readers raise AnswerError and nothing else, whatever the server sends.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from sglang_qspec.errors import AnswerError, QSpecError

MAX_BYTES = 32 << 20
"""Maximum size of one answer, or of one line of a stream, in decoded bytes. Clients accept no
compressed answers, so these are the received bytes."""
MAX_NESTING = 64
"""Maximum number of lists and objects inside each other. Writing a value again needs a part of the
interpreter's stack for each."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys, except line ends and tabs."""
SHOWN = 300
"""Maximum length of a server's text in a message."""
_ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What code raises that uses an answer with absent fields, or with values of other types."""


def decode(data: bytes) -> Any:
    """The value of a server's JSON, which can be written as JSON again.

    Raises AnswerError for everything else: too many bytes or brackets inside each other, no UTF-8,
    NaN, numbers beyond those of JSON, half surrogate pairs.
    """
    check_size(len(data))
    try:
        value = json.loads(data.decode())
        _check_nesting(value)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"is not JSON: {type(error).__name__}") from None
    return value


def check_size(count: int) -> None:
    """Raise AnswerError if an answer has too many bytes."""
    if count > MAX_BYTES:
        raise AnswerError(f"is longer than {MAX_BYTES >> 20} MiB")


def _check_nesting(value: Any) -> None:
    """Raise ValueError if too many lists and objects are inside each other."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        lists = [each for each in level if isinstance(each, list)]
        lists += [list(each.values()) for each in level if isinstance(each, dict)]
        level = [each for members in lists for each in members]
        if not level:
            return
    raise ValueError("too many brackets inside each other")


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Raise AnswerError if a decoded answer of the server at `url` lacks what the context uses."""
    try:
        yield
    except QSpecError:
        raise
    except _ODD as error:
        what = f"{type(error).__name__}: {error}"
        raise AnswerError(f"the answer of {url} is odd: {message(what)}") from error


def printable(text: str) -> str:
    """A text without the characters that a terminal obeys; line ends and tabs stay."""
    return _CONTROLS.sub("", text)


def message(text: str) -> str:
    """A server's text for a message: in one line, of at most SHOWN characters."""
    return " ".join(printable(text[: 2 * SHOWN]).split())[:SHOWN]


def message_of(data: bytes) -> str:
    """The message in the body of an HTTP error, or the body itself if it is not JSON; one line."""
    try:
        found = decode(data)
    except AnswerError:
        found = data[: 8 * SHOWN].decode(errors="replace")
    return message_in(found) or "without a message"


def message_in(body: Any) -> str:
    """The message of a decoded error in the format of SGLang, OpenAI or FastAPI."""
    while isinstance(body, dict):
        inner = [body[key] for key in ("error", "message", "detail") if key in body]
        if not inner:
            break
        body = inner[0]
    return message(str(body))
