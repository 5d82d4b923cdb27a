"""Checks what clients send: the fields of requests. All functions raise ApiError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_qspec.errors import shown
from sglang_qspec.tools.batch.line import PROMPT_KEYS
from sglang_qspec.tools.serve_batches.objects import ApiError

LONGEST_WINDOW_S = 30 * 24 * 3600
EXPIRES_S = range(3600, 30 * 24 * 3600 + 1)
"""Allowed lives of files, in seconds."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Limits of metadata."""
_WINDOW = re.compile(r"([1-9][0-9]{0,7})([smhd])")


class NewBatch(msgspec.Struct, kw_only=True, frozen=True):
    """A checked request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    seconds: int
    """The completion window in seconds."""
    metadata: dict[str, str] | None
    output_expires_after: int | None


def new_batch(data: bytes) -> NewBatch:
    """Read the body of POST /v1/batches."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {shown(body)}, but must be a JSON object")
    window = _text(body, "completion_window")
    endpoint = _text(body, "endpoint")
    if endpoint not in PROMPT_KEYS:
        raise wrong("endpoint", endpoint, "one of " + ", ".join(PROMPT_KEYS))
    return NewBatch(
        input_file_id=_text(body, "input_file_id"),
        endpoint=endpoint,
        completion_window=window,
        seconds=seconds_of(window),
        metadata=_metadata(body.get("metadata")),
        output_expires_after=_expires_after(body.get("output_expires_after")),
    )


def seconds_of(window: str) -> int:
    """The seconds of a completion window such as 30m, 1h or 24h."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 1 <= seconds <= LONGEST_WINDOW_S:
        raise wrong("completion_window", window, "a time such as 30m, 1h or 24h, of at most 30d")
    return seconds


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(name, value, "a text")
    return value


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    allowed = (
        f"at most {MAX_PAIRS} texts of at most {MAX_VALUE} characters, with names of at most "
        f"{MAX_KEY}"
    )
    is_allowed = isinstance(value, dict) and len(value) <= MAX_PAIRS
    if not is_allowed or not all(
        isinstance(each, str) and len(each) <= MAX_VALUE and len(key) <= MAX_KEY
        for key, each in value.items()
    ):
        raise wrong("metadata", value, allowed)
    return dict(value)


def _expires_after(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("output_expires_after", value, "an object with anchor and seconds")
    return expires_after("output_expires_after", value.get("anchor"), value.get("seconds"))


def expires_after(name: str, anchor: Any, seconds: Any) -> int:
    """The seconds after which a file expires; `seconds` may be a text of digits."""
    if anchor != "created_at":
        raise wrong(f"{name}[anchor]", anchor, "'created_at'")
    if isinstance(seconds, str) and re.fullmatch("[0-9]{1,8}", seconds):
        seconds = int(seconds)
    if type(seconds) is not int or seconds not in EXPIRES_S:
        allowed = f"a number from {EXPIRES_S.start} to {EXPIRES_S.stop - 1}"
        raise wrong(f"{name}[seconds]", seconds, allowed)
    return seconds


def whole(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    """A number from 1 to `most` of a query."""
    text = query.get(name, "")
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,8}", text) or not 1 <= int(text) <= most:
        raise wrong(name, text, f"a number from 1 to {most}")
    return int(text)


def choice(query: Mapping[str, str], name: str, *choices: str) -> str | None:
    """A value of a query that is absent or one of `choices`."""
    text = query.get(name)
    if text is not None and text not in choices:
        raise wrong(name, text, "one of " + ", ".join(choices))
    return text


def wrong(name: str, value: object, allowed: str) -> ApiError:
    """The error for a field with a value that is not allowed."""
    message = f"{name} is {shown(value)}, but must be {allowed}"
    return ApiError(400, message, param=name, code="invalid_value")
