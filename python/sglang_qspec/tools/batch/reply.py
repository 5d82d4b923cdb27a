"""Reads the response of a server to one line."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_qspec.errors import AnswerError
from sglang_qspec.tools.batch.line import FIGURES, RESPONSES, Line
from sglang_qspec.tools.batch.server import Reply, ReplyKind
from sglang_qspec.tools.complete import peers

_BUSY = frozenset({429, 503})
_ENDED = ("completed", "incomplete")
"""States of a response that will not change; an incomplete one has reached its length."""
_AGAIN = frozenset({408, 425})
"""Statuses below 500 with which the server does not blame the request."""


MAX_COUNT = 2**31
"""Maximum of a figure of one answer."""


def reply_of(status: int, data: bytes, line: Line) -> Reply:
    """The reply in a response with this HTTP status and these bytes."""
    try:
        found = peers.decode(data)
    except AnswerError:
        found = None
    if status != 200:
        return _error(status, data, found)
    try:
        return _answer(found, line)
    except AnswerError as error:
        return Reply(ReplyKind.FAILED, status, _json(data, found), f"the answer {error}")


def _answer(found: Any, line: Line) -> Reply:
    """The reply in a decoded answer. Raises AnswerError for what a server does not send."""
    if line.url == RESPONSES:
        return _response(found)
    choices = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(choices, list) or not choices:
        raise AnswerError("has no choices")
    if not all(isinstance(each, dict) for each in choices):
        raise AnswerError("has choices that are no JSON objects")
    if any(each.get("finish_reason") == "abort" for each in choices):
        reason = "the server aborted the request"
        return Reply(ReplyKind.FAILED, 200, msgspec.json.encode(found), reason)
    passes, accepted = _take_figures(found, line)
    return _answered(found, "completion_tokens", passes=passes, accepted=accepted)


def _response(found: Any) -> Reply:
    """The reply in a decoded response of RESPONSES. Raises AnswerError as `_answer`."""
    if not isinstance(found, dict) or not isinstance(found.get("output"), list):
        raise AnswerError("has no output")
    status = found.get("status")
    if status not in _ENDED:
        reason = f"the response is {peers.message(str(status))}"
        return Reply(ReplyKind.FAILED, 200, msgspec.json.encode(found), reason)
    return _answered(found, "output_tokens")


def _answered(found: dict[str, Any], counted: str, **figures: Any) -> Reply:
    """The reply of an answer; `counted` is the field of its usage with the output tokens."""
    name, usage = found.get("id"), found.get("usage")
    return Reply(
        ReplyKind.ANSWERED,
        200,
        msgspec.json.encode(found),
        request_id=name if isinstance(name, str) else "",
        tokens=_count(usage, counted) if isinstance(usage, dict) else 0,
        **figures,
    )


def _error(status: int, data: bytes, found: Any) -> Reply:
    if status in _BUSY:
        kind = ReplyKind.BUSY
    elif status < 500 and status not in _AGAIN:
        kind = ReplyKind.REFUSED
    else:
        kind = ReplyKind.FAILED
    reason = "redirects are not followed" if 300 <= status < 400 else peers.message_of(data)
    return Reply(kind, status, _json(data, found), f"HTTP {status}: {reason}")


def _json(data: bytes, found: Any) -> bytes:
    """The bytes of a response as JSON: themselves, or a text if they are not JSON."""
    if found is not None:
        return msgspec.json.encode(found)
    return msgspec.json.encode(data[:1000].decode(errors="replace"))


def _take_figures(found: dict[str, Any], line: Line) -> tuple[int, int]:
    """Passes and accepted draft tokens of an answer, which loses them unless the line has them.

    Raises AnswerError if they are no counts.
    """
    extension = found.get("sglext")
    if not isinstance(extension, dict):
        return 0, 0
    details = extension.get(FIGURES.removeprefix("return_"))
    if line.hides_figures:
        extension.pop(FIGURES.removeprefix("return_"), None)
        if not any(value is not None for value in extension.values()):
            del found["sglext"]
    each = details if isinstance(details, list) else [details]
    numbers = [one for one in each if isinstance(one, dict)]
    return (
        sum(_count(one, "spec_verify_ct") for one in numbers),
        sum(_count(one, "spec_num_correct_drafts") for one in numbers),
    )


def _count(figures: dict[str, Any], name: str) -> int:
    """A figure of an answer; 0 if it is absent or null. Raises AnswerError if it is no count."""
    value = figures.get(name) or 0
    if not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise AnswerError(f"has a strange {name}")
    return value
