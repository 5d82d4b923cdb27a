"""One HTTP request, and a client that may lose patience or hang up in the middle of an answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LIMIT_S = 1200.0
"""Longer than any answer takes, on a busy machine and behind a burst too."""


@dataclass(frozen=True)
class Outcome:
    """What became of a request."""

    status: int | None
    """Of HTTP, or the code of an error that came in the stream; None if there was no answer."""
    data: Any
    """The decoded answer, or the list of the pieces that came."""
    streamed: bool
    hung_up: bool
    """Whether the client went before the answer's end."""
    error: str | None
    seconds: float


def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    *,
    patience: float | None = None,
    pieces: int | None = None,
) -> Outcome:
    """Send the request, and read its answer.

    A client with `patience` hangs up after this many seconds, one with `pieces` after this many of
    a stream. What goes wrong is told in the outcome, not raised.
    """
    began = time.monotonic()
    deadline = began + (LIMIT_S if patience is None else patience)
    streams = bool(body.get("stream"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline - began)
    status: int | None = None
    found: list[Any] = []
    response: http.client.HTTPResponse | None = None

    def outcome(data: Any, hung_up: bool = False, error: str | None = None) -> Outcome:
        return Outcome(status, data, streams, hung_up, error, time.monotonic() - began)

    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        # The connection lets go of its socket once the answer is to end it.
        channel = connection.sock
        _wait_until(channel, deadline)
        response = connection.getresponse()
        status = response.status
        if status != 200 or not streams:
            _wait_until(channel, deadline)
            return outcome(_decoded(response.read()))
        for piece in _pieces(response, channel, deadline):
            if "error" in piece:
                status = _code(piece["error"])
                return outcome(found, error=str(piece["error"]))
            found.append(piece)
            if pieces is not None and len(found) >= pieces:
                return outcome(found, hung_up=True)
        return outcome(found)
    except TimeoutError:
        if patience is not None:
            return outcome(found, hung_up=True)
        return outcome(found, error=f"no answer in {LIMIT_S:g} s")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return outcome(found, error=f"{type(error).__name__}: {error}")
    finally:
        # The one that is read last holds the socket.
        if response is not None:
            response.close()
        connection.close()


def _pieces(response: Any, channel: Any, deadline: float) -> Iterator[Any]:
    """Of a stream of events. Raises ValueError if it ends without its mark of the end."""
    while True:
        _wait_until(channel, deadline)
        line = response.readline()
        if not line:
            raise ValueError("the stream ended before [DONE]")
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def _wait_until(channel: Any, deadline: float) -> None:
    """The next read waits no longer. Raises TimeoutError if it is too late already."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    channel.settimeout(left)


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def _code(error: Any) -> int:
    """Of an error in a stream: 400 unless it tells another one."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 400
