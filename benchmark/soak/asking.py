"""One HTTP request of the soak, by a client that may hang up before its answer ends."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

LIMIT_S = 1200.0
"""Longer than any answer takes, on a busy machine and behind a burst too."""


@dataclass
class Outcome:
    """What became of a request."""

    status: int | None
    """HTTP status, or the code of an error in the stream; None without an answer."""
    data: Any
    """The decoded answer, or the list of the pieces that came."""
    streamed: bool
    hung_up: bool = False
    """Whether the client closed the connection before the answer's end."""
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
    """Send the request, and read its answer; errors are in the outcome and are not raised.

    The client hangs up after `hang_up_s` seconds, or after `pieces` pieces of a stream.
    """
    began = time.monotonic()
    outcome = Outcome(None, [], bool(body.get("stream")))
    url = f"http://127.0.0.1:{port}{path}"
    limit = LIMIT_S if hang_up_s is None else hang_up_s
    try:
        asyncio.run(asyncio.wait_for(_ask(url, body, pieces, outcome), limit))
    except TimeoutError:
        outcome.hung_up = hang_up_s is not None
        outcome.error = None if outcome.hung_up else f"no answer in {LIMIT_S:g} s"
    except (httpx.HTTPError, OSError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.seconds = time.monotonic() - began
    return outcome


async def _ask(url: str, body: dict[str, Any], pieces: int | None, outcome: Outcome) -> None:
    """Fills in the outcome. Raises ValueError if a stream ends before its `[DONE]`."""
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client,
        client.stream("POST", url, json=body) as response,
    ):
        outcome.status = response.status_code
        if response.is_error or not outcome.streamed:
            outcome.data = _decoded(await response.aread())
            return
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            piece = json.loads(data) if data else {}
            if "error" in piece:
                outcome.status, outcome.error = _code(piece["error"]), str(piece["error"])
                return
            if data:
                outcome.data.append(piece)
            if pieces is not None and len(outcome.data) >= pieces:
                outcome.hung_up = True
                return
        raise ValueError("the stream ended before [DONE]")


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def _code(error: Any) -> int:
    """The status in an error of a stream; 400 if there is none."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 400
