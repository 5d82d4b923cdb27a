"""Reads the response of a server to one line."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_qspec.batch.line import FIGURES, Line
from sglang_qspec.batch.server import Reply, Verdict
from sglang_qspec.complete.client import reason_of

REASON = 300
"""Maximum length of a reason; the record also has the whole response."""
_BUSY = frozenset({429, 503})
_AGAIN = frozenset({408, 425})
"""Statuses below 500 with which the server does not blame the request."""


def reply_of(status: int, data: bytes, line: Line) -> Reply:
    """The reply in a response with this HTTP status and these bytes."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if status != 200:
        return _error(status, data, found)
    if not isinstance(found, dict) or not isinstance(found.get("choices"), list):
        return Reply(Verdict.FAILED, status, _json(data, found), "the answer has no choices")
    if any(isinstance(c, dict) and c.get("finish_reason") == "abort" for c in found["choices"]):
        return Reply(Verdict.FAILED, status, _json(data, found), "the server aborted the request")
    passes, accepted = _take_figures(found, line)
    usage = found.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
    return Reply(
        Verdict.ANSWERED,
        status,
        msgspec.json.encode(found),
        request_id=str(found.get("id") or ""),
        tokens=tokens if isinstance(tokens, int) else 0,
        passes=passes,
        accepted=accepted,
    )


def _error(status: int, data: bytes, found: Any) -> Reply:
    if status in _BUSY:
        verdict = Verdict.BUSY
    elif status < 500 and status not in _AGAIN:
        verdict = Verdict.REFUSED
    else:
        verdict = Verdict.FAILED
    reason = reason_of(data.decode(errors="replace"))
    return Reply(verdict, status, _json(data, found), f"HTTP {status}: {reason}"[:REASON])


def _json(data: bytes, found: Any) -> bytes:
    """The bytes of a response as JSON: themselves, or a text if they are not JSON."""
    if found is not None:
        return msgspec.json.encode(found)
    return msgspec.json.encode(data[:1000].decode(errors="replace"))


def _take_figures(found: dict[str, Any], line: Line) -> tuple[int, int]:
    """Passes and accepted draft tokens of an answer, which loses them unless the line has them."""
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
        sum(int(one.get("spec_verify_ct") or 0) for one in numbers),
        sum(int(one.get("spec_num_correct_drafts") or 0) for one in numbers),
    )
