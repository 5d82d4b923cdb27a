"""Sends an HTTP request of the soak, as a client that may hang up before the end of its answer."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from benchmark.harness.server import events

LIMIT_S = 1200.0
"""Time limit of a request; no answer takes so long, even on a busy machine and behind a burst."""


@dataclass
class Outcome:
    """The end of a request."""

    status: int | None
    """HTTP status, or the code of an error in the stream; None without an answer."""
    data: Any
    """The decoded answer, or the list of the received pieces."""
    streamed: bool
    hung_up: bool = False
    """Whether the client closed the connection before the end of the answer."""
    error: str | None = None
    seconds: float = 0.0


def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    *,
    hang_up_s: float | None = None,
    pieces: int | None = None,
) -> Outcome:
    """Send the request and read its answer; the outcome holds errors, and none is raised.

    The client hangs up after `hang_up_s` seconds, or after `pieces` pieces of a stream.
    """
    began = time.monotonic()
    outcome = Outcome(None, [], bool(body.get("stream")))
    limit = LIMIT_S if hang_up_s is None else hang_up_s
    try:
        _ask(f"http://127.0.0.1:{port}{path}", body, pieces, began + limit, outcome)
    except (TimeoutError, httpx.TimeoutException):
        outcome.hung_up = hang_up_s is not None
        outcome.error = None if outcome.hung_up else f"no answer in {LIMIT_S:g} s"
    except (httpx.HTTPError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.seconds = time.monotonic() - began
    return outcome


def _ask(
    url: str, body: dict[str, Any], pieces: int | None, deadline: float, outcome: Outcome
) -> None:
    """Fill in the outcome. Raises TimeoutError, an error of httpx, or an error of `events`."""
    # The limit of a single read; a stream checks the deadline at each piece.
    limit = deadline - time.monotonic()
    with (
        httpx.Client(timeout=limit, trust_env=False, verify=False) as client,
        client.stream("POST", url, json=body) as response,
    ):
        outcome.status = response.status_code
        if response.is_error or not outcome.streamed:
            outcome.data = _decoded(response.read())
            return
        for piece in events(response):
            if "error" in piece:
                outcome.status, outcome.error = _code(piece["error"]), str(piece["error"])
                return
            outcome.data.append(piece)
            if pieces is not None and len(outcome.data) >= pieces:
                outcome.hung_up = True
                return
            if time.monotonic() >= deadline:
                raise TimeoutError


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def _code(error: Any) -> int:
    """The status in an error of a stream; 400 if there is none."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 400
